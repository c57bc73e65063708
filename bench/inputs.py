"""The windows that plans are judged on: global batches drawn from real length traces.

A window is defined by the trace, its size B and its index w: `perm = default_rng(0).permutation(len(lengths))`, then
`lengths[perm[w * B:(w + 1) * B]]`, clipped to 1 to 32768. So the first lengths of the permuted trace hold all of them:
`tests/data/windows.npz` has up to STORED of each trace, and `tests/data/windows.json` the best step cost known of each
window by long search and what the transformers sampler reaches there. With the traces at hand, `--traces` reads those.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.exact import IntArray

DATA = Path(__file__).parent.parent / "tests" / "data"
LONGEST = 32768
STORED = 32768
UNITS = (10_000, 1_000)  # 1 / alpha: the default of CostModel, and that of the transformers sampler

Shape = tuple[int, int, int]  # B, D, G


@dataclass(frozen=True, eq=False)
class Window:
    """One global batch with what is known of it.

    Attributes:
        trace: name of the trace.
        shape: B, D, G.
        index: which window of the trace.
        lengths: int64 [B].
        best_known: best step cost known, sync "microbatch", unit UNITS[0], in `bench.exact` integers.
        exact: whether no plan is better than `best_known`.
        peer: step cost of the transformers sampler given the same cost, by (unit, sync).
    """

    trace: str
    shape: Shape
    index: int
    lengths: IntArray
    best_known: int
    exact: bool
    peer: dict[tuple[int, str], int]

    @property
    def name(self) -> str:
        """Trace, shape and index."""
        return f"{self.trace} {self.shape} #{self.index}"


def permuted(lengths: Any) -> IntArray:
    """Lengths in the order that windows are cut from."""
    order = np.random.default_rng(0).permutation(len(lengths))
    return np.clip(np.asarray(lengths)[order].astype(np.int64), 1, LONGEST)


def permuted_traces(folder: Path | None = None) -> dict[str, IntArray]:
    """Permuted lengths by trace: the stored ones, or those of the `*.npz` files (array `lengths`) in `folder`."""
    if folder is None:
        with np.load(DATA / "windows.npz") as stored:
            return {name: stored[name].astype(np.int64) for name in stored.files}
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise SystemExit(f"bench: --traces: no .npz file in {folder}")
    traces = {}
    for file in files:
        with np.load(file) as archive:
            traces[file.stem] = permuted(archive["lengths"])
    return traces


def cut(trace: IntArray, size: int, index: int) -> IntArray:
    """Window `index` of a permuted trace."""
    return trace[index * size : (index + 1) * size]


def windows(folder: Path | None = None) -> list[Window]:
    """Every window whose best cost is known; lengths from `folder` if given."""
    traces = permuted_traces(folder)
    return [
        Window(
            trace=row["trace"],
            shape=(row["B"], row["D"], row["G"]),
            index=row["window"],
            lengths=cut(traces[row["trace"]], row["B"], row["window"]),
            best_known=row["best_known"],
            exact=row["exact"],
            peer={(unit, sync): row[f"peer_{unit}_{sync}"] for unit in UNITS for sync in ("microbatch", "step")},
        )
        for row in json.loads((DATA / "windows.json").read_text())["windows"]
        if row["trace"] in traces
    ]


def rows_of(trace: IntArray, size: int, count: int) -> IntArray:
    """`count` rows of `size` samples of a permuted trace, int64 [count, size]; windows repeat if there are too few."""
    distinct = len(trace) // size
    return np.stack([cut(trace, size, index % distinct) for index in range(count)])
