"""Balanced partitions beside the Karmarkar-Karp method in Python, on the same lengths: time and balance.

The peer is the largest differencing method as the literature describes it, for K groups: what RL trainers run on the
driver. Balance is the largest group over the least it could be.
"""

from __future__ import annotations

import heapq
import statistics
import time
from pathlib import Path

import numpy as np

from bench.options import parser
from bench.record import Record
from gpusampler.kernels.partition import partition, sums_of

SHAPES = ((1024, 256), (1024, 64), (512, 32))
TARGET = (1024, 256)
REPEATS = 5


def differencing(costs: list[int], groups: int, equal_size: bool = False) -> list[list[int]]:
    """Largest differencing method: repeatedly join the two partial partitions with the most spread loads.

    Args:
        costs: positive.
        groups: K; with `equal_size` a divisor of the number of costs.
        equal_size: start from K costs, consecutive in sorted order, a partial partition, so that groups stay equal.
    """
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    step = groups if equal_size else 1
    heap = []
    for start in range(0, len(order), step):
        parts = [(costs[i], [i]) for i in order[start : start + step]]
        parts += [(0, [])] * (groups - len(parts))
        heap.append((parts[-1][0] - parts[0][0], start, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, start, high = heapq.heappop(heap)
        _, _, low = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(high, reversed(low), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], start, joined))
    return [members for _, members in heap[0][2]]


def inputs(size: int, folder: Path | None) -> dict[str, np.ndarray]:
    """Lengths by name: drawn from distributions, and samples of the traces in `folder`."""
    rng = np.random.default_rng(0)
    made = {
        "lognormal": np.exp(rng.normal(6, 0.9, size)).astype(np.int64) + 1,
        "uniform": rng.integers(1, 8192, size),
        "narrow": rng.integers(900, 1100, size),
    }
    for file in sorted(folder.glob("*.npz")) if folder else ():
        lengths = np.load(file)["lengths"].astype(np.int64)
        made[file.stem] = np.resize(rng.permutation(lengths), size)
    return made


def measure(costs: np.ndarray, groups: int, equal_size: bool) -> tuple[float, float, float, float]:
    """(largest / least possible, seconds) of the peer, then of this package; both partitions are checked first."""
    floor = max(int(costs.max()), -(-int(costs.sum()) // groups))
    began = time.perf_counter()
    theirs = differencing(costs.tolist(), groups, equal_size)
    seconds = time.perf_counter() - began
    if sorted(i for group in theirs for i in group) != list(range(len(costs))):
        raise RuntimeError("the peer's partition is wrong")
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        group_of = partition(costs, groups, equal_size=equal_size)
        times.append(time.perf_counter() - began)
    counts = np.bincount(group_of, minlength=groups)
    if len(counts) != groups or counts.min() == 0 or (equal_size and counts.max() != len(costs) // groups):
        raise RuntimeError("the partition is wrong")
    peer = max(int(costs[group].sum()) for group in theirs)
    own = int(sums_of(costs, group_of, groups).max())
    return peer / floor, seconds, own / floor, statistics.median(times)


def run(argv: list[str]) -> int:
    """Measure, print and record."""
    made = parser("partition", "balanced partitions beside Karmarkar-Karp in Python")
    made.add_argument("--traces", type=Path, metavar="DIR", help="folder of NAME.npz with an array `lengths` each")
    options = made.parse_args(argv)
    record = Record("partition", argv)
    partition(np.array([1, 2]), 2)
    outcomes = []
    for size, groups in SHAPES:
        for equal_size in (False, True):
            rows = []
            for name, costs in inputs(size, options.traces).items():
                peer, peer_time, own, own_time = measure(costs, groups, equal_size)
                speedup = peer_time / own_time
                rows.append([name, peer, own, f"{peer_time * 1e3:.1f}", f"{own_time * 1e3:.2f}", f"{speedup:.0f}"])
                outcomes.append(((size, groups), equal_size, name, peer, own, speedup))
            record.say(f"## n = {size}, K = {groups}{', equal sizes' if equal_size else ''}")
            record.table(["lengths", "peer max/least", "own max/least", "peer ms", "own ms", "times faster"], rows)
    record.figures["cases"] = outcomes
    worse = [outcome for outcome in outcomes if outcome[4] > outcome[3]]
    speeds = [outcome[5] for outcome in outcomes if outcome[0] == TARGET and not outcome[1]]
    reached = record.target("balance at least as good as the peer's in every case", not worse, f"{len(worse)} worse")
    reached &= record.target(
        f"at least 100 times faster at (n, K) = {TARGET}, free sizes", min(speeds) >= 100, f"least {min(speeds):.0f}"
    )
    record.write(options.results)
    return 0 if reached else 1
