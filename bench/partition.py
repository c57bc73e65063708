"""Balanced partitions beside the Karmarkar-Karp method in Python, on the same lengths: time and balance.

The peers are a plain largest differencing method for K groups, and, given its file, the one that verl runs on the
driver of RL training (`verl/utils/seqlen_balancing.py`; only that function is executed). Balance is the largest group
over the least it could be.
"""

from __future__ import annotations

import ast
import heapq
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


Peer = Callable[[list[int], int, bool], list[list[int]]]


def verl_method(file: Path) -> Peer:
    """The function `karmarkar_karp` of verl's file, without importing what else the file needs."""
    names: dict[str, Any] = {"heapq": heapq}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == "karmarkar_karp":
            exec(compile(ast.Module([node], []), str(file), "exec"), names)
            peer: Peer = names["karmarkar_karp"]
            return peer
    raise ValueError(f"{file} has no function karmarkar_karp")


def timed(peer: Peer, costs: np.ndarray, groups: int, equal_size: bool) -> tuple[int, float]:
    """Largest group and seconds of a peer, whose partition is checked."""
    began = time.perf_counter()
    theirs = peer(costs.tolist(), groups, equal_size)
    seconds = time.perf_counter() - began
    if sorted(i for group in theirs for i in group) != list(range(len(costs))):
        raise RuntimeError("the peer's partition is wrong")
    return max(int(costs[group].sum()) for group in theirs), seconds


def measure(costs: np.ndarray, groups: int, equal_size: bool) -> tuple[int, float]:
    """Largest group and median seconds of this package's partition, which is checked."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        group_of = partition(costs, groups, equal_size=equal_size)
        times.append(time.perf_counter() - began)
    counts = np.bincount(group_of, minlength=groups)
    if len(counts) != groups or counts.min() == 0 or (equal_size and counts.max() != len(costs) // groups):
        raise RuntimeError("the partition is wrong")
    return int(sums_of(costs, group_of, groups).max()), statistics.median(times)


def run(argv: list[str]) -> int:
    """Measure, print and record."""
    made = parser("partition", "balanced partitions beside Karmarkar-Karp in Python")
    made.add_argument("--traces", type=Path, metavar="DIR", help="folder of NAME.npz with an array `lengths` each")
    made.add_argument("--verl", type=Path, metavar="FILE", help="verl/utils/seqlen_balancing.py of a checkout of verl")
    options = made.parse_args(argv)
    record = Record("partition", argv)
    peers: dict[str, Peer] = {"plain": differencing}
    if options.verl:
        peers["verl"] = verl_method(options.verl)
    partition(np.array([1, 2]), 2)
    worse: list[str] = []
    faster: dict[str, list[float]] = {name: [] for name in peers}
    for size, groups in SHAPES:
        for equal_size in (False, True):
            rows: list[list[Any]] = []
            for name, costs in inputs(size, options.traces).items():
                floor = max(int(costs.max()), -(-int(costs.sum()) // groups))
                own, seconds = measure(costs, groups, equal_size)
                row: list[Any] = [name, own / floor, f"{seconds * 1e3:.2f}"]
                for peer_name, peer in peers.items():
                    largest, peer_seconds = timed(peer, costs, groups, equal_size)
                    row += [largest / floor, f"{peer_seconds * 1e3:.1f}", f"{peer_seconds / seconds:.0f}"]
                    if own > largest:
                        worse.append(f"{name} {size} {groups} {peer_name}")
                    if (size, groups) == TARGET and not equal_size:
                        faster[peer_name].append(peer_seconds / seconds)
                rows.append(row)
            record.say(f"## n = {size}, K = {groups}{', equal sizes' if equal_size else ''}")
            titles = [f"{name} {what}" for name in peers for what in ("max/least", "ms", "times slower")]
            record.table(["lengths", "max/least", "ms", *titles], rows)
    record.figures |= {"worse": worse, "times faster": faster}
    reached = record.target("balance at least as good as every peer's in every case", not worse, f"{len(worse)} worse")
    for name, ratios in faster.items():
        found = f"{min(ratios):.0f}, median {statistics.median(ratios):.0f}"
        what = f"times faster than {name} at (n, K) = {TARGET}, free sizes"
        if name == "verl":
            reached &= record.target(f"at least 100 {what}", min(ratios) >= 100, found)
        else:
            record.say(f"- least {what}: {found}")
    record.write(options.results)
    return 0 if reached else 1
