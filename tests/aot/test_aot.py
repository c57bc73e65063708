"""Every kernel, as compiled for every supported chip, keeps its budget and is what the committed table says."""

from __future__ import annotations

import pytest

from bench import compile_stats
from bench.compile_stats import Stats

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def measured() -> list[tuple[Stats, list[str]]]:
    return list(compile_stats.measure())


def test_nothing_spills_or_exceeds_a_chip(measured: list[tuple[Stats, list[str]]]):
    assert [(stats, found) for stats, found in measured if found] == []


def test_all_chips_are_there(measured: list[tuple[Stats, list[str]]]):
    assert {stats.chip for stats, _ in measured} == {80, 90, 100, 120}
    assert len({(stats.kernel, stats.variant, stats.chip) for stats, _ in measured}) == len(measured)


def test_the_committed_table_holds(measured: list[tuple[Stats, list[str]]]):
    triton = pytest.importorskip("triton")
    version, rows = compile_stats.read_table()
    if version != triton.__version__:
        pytest.skip(f"the table is for triton {version}")
    assert [stats for stats, _ in measured] == rows
