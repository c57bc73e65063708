"""Small rows for the planner, and their optimum by trying every partition."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

LIMIT = 1 << 62
LONGEST = 2**31 - 1
SENTINEL = -7_777_777


class Row(NamedTuple):
    """A sorted row as the search sees it."""

    lengths: Any
    f: Any
    inverse: Any
    tail: Any
    most: Any


def make_row(lengths: Sequence[int], costs: Sequence[int] | None = None, cap: int = 0) -> Row:
    """Sort `lengths`; the costs are the lengths themselves unless given, longest first."""
    ordered = np.array(sorted(lengths, reverse=True), dtype=np.int64)
    f = ordered.copy() if costs is None else np.array(costs, dtype=np.int64)
    most = [max(1, cap // int(x)) if cap else len(ordered) for x in ordered]
    tail = np.append(np.cumsum(f[::-1])[::-1], 0).astype(np.int64)
    return Row(ordered, f, 1.0 / f, tail, np.array(most, dtype=np.int64))


def partitions(items: Sequence[int], blocks: int) -> Iterator[list[list[int]]]:
    """All set partitions of the positions of `items` into exactly `blocks` blocks."""

    def extend(at: int, parts: list[list[int]]) -> Iterator[list[list[int]]]:
        if len(items) - at < blocks - len(parts):
            return
        if at == len(items):
            yield parts
            return
        for part in parts:
            part.append(items[at])
            yield from extend(at + 1, parts)
            part.pop()
        if len(parts) < blocks:
            parts.append([items[at]])
            yield from extend(at + 1, parts)
            parts.pop()

    yield from extend(0, [])


def best_of_all(f: Sequence[int], groups: int, cap: int = 0) -> tuple[int, int]:
    """Least maximum and least sum of padded group costs over all set partitions; -1 if the cap allows none.

    Costs and capped lengths are the same numbers here; a sample above the cap may go alone.
    """
    largest, total = [], []
    for parts in partitions(f, groups):
        costs = [len(part) * max(part) for part in parts]
        if not cap or all(cost <= cap or len(part) == 1 for cost, part in zip(costs, parts, strict=True)):
            largest.append(max(costs))
            total.append(sum(costs))
    return (min(largest), min(total)) if largest else (-1, -1)


def cuts(size: int, groups: int) -> Iterator[list[int]]:
    """Sizes of all contiguous partitions."""
    for inner in itertools.combinations(range(1, size), groups - 1):
        edges = (0, *inner, size)
        yield [edges[k + 1] - edges[k] for k in range(groups)]


def costs_of(f: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Padded cost of each group, in Python integers."""
    costs, start = [], 0
    for count in counts:
        costs.append(int(count) * int(f[start]))
        start += int(count)
    assert start == len(f)
    return costs


lengths_of_any_kind = st.one_of(
    st.lists(st.integers(1, 12), min_size=1, max_size=7),
    st.lists(st.integers(1, 5000), min_size=1, max_size=7),
    st.lists(st.integers(1, 10**9), min_size=1, max_size=7),
    st.lists(st.sampled_from([16, 1024, 4096]), min_size=1, max_size=7),
    st.integers(1, 6).map(lambda n: [LONGEST] + [1] * n),
)
wide_rows = st.one_of(
    st.lists(st.integers(1, 5000), min_size=8, max_size=120),
    st.lists(st.sampled_from([1, 16, 1024, 4096]), min_size=8, max_size=120),
    st.integers(8, 60).map(lambda n: [100_000] + [1] * n),
    st.integers(8, 60).map(lambda n: [77] * n),
    st.lists(st.floats(1, 11), min_size=8, max_size=120).map(lambda xs: [int(2.71828**x) for x in xs]),
)
