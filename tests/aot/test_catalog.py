"""The catalogue holds every variant that the launcher can produce, and faults are found."""

from __future__ import annotations

import itertools

import pytest

from bench.compile_stats import CHIPS, FORBIDDEN, Stats, faults
from gpusampler.kernels import launch
from gpusampler.kernels.catalog import variants

GOOD = Stats("sort_rows", "packed=1 block=64 i32", 90, 2, 28, 0, 0, 1024, 100, 1600)


@pytest.mark.parametrize("chip", CHIPS)
def test_every_shape_is_in_the_catalogue(chip: int):
    known = {(variant.name, tuple(variant.constants.values()), variant.num_warps) for variant in variants(chip)}
    for size in range(1, launch.MAX_GROUPS + 1):
        shape = launch.group_shape(size)
        for name in ("start", "deal", "even", "places"):
            assert (name, (shape.block,), shape.num_warps) in known
    for size, key_bytes in itertools.product(range(1, launch.MAX_SORT + 2), (4, 8)):
        sort = launch.sort_shape(size, key_bytes, launch.SHARED_BYTES[chip])
        assert sort is None or ("sort_rows", (key_bytes == 4, sort.block), sort.num_warps) in known
    for slots in range(2, launch.MAX_SLOTS + 1):
        walk = launch.walk_shape(slots)
        assert ("walk", (walk.lanes, walk.slots), walk.num_warps) in known


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"stack": 8}, "spills: stack 8, local 0"),
        ({"local": 4}, "spills: stack 0, local 4"),
        ({"registers": 128, "warps": 32}, "128 registers x 1024 threads"),
        ({"shared": 232449}, "232449 bytes of shared memory"),
        ({"shared": 101377, "chip": 120}, "101377 bytes of shared memory"),
        ({"registers": 8, "warps": 64}, "2048 threads"),
    ],
)
def test_faults_are_found(changed: dict[str, int], fault: str):
    assert faults(GOOD._replace(**changed), "") == [fault]


@pytest.mark.parametrize("operation", ["fma.rn.f32", "fma.rn.f64", "div.full.f32", "sqrt.approx.ftz.f32"])
def test_forbidden_operations_are_found(operation: str):
    assert FORBIDDEN.findall(f"\t{operation} %f1, %f2, %f3;")
    assert faults(GOOD, f"\t{operation} %f1, %f2, %f3;")


def test_a_good_kernel_has_no_faults():
    assert faults(GOOD, "\tdiv.rn.f64 %fd1, %fd2, %fd3;\n\tmul.rn.f64 %fd1, %fd2, %fd3;") == []
