"""What the kernels bench sets the kernels against, and what its estimates are made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.torch_search import min_max_levels
from gpusampler.cost import alpha_table
from gpusampler.kernels import spec

pytest.importorskip("triton")
from bench.estimate import Instruction, cycles, read_code

SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;             /* 0x00000a0000017a02 */
                                                                      /* 0x000fe40000000f00 */
        /*0010*/                   LDG.E R2, [R4.64] ;                /* 0x0000000404027981 */
                                                                      /* 0x000ea4000c1e1900 */
        /*0020*/              @!P0 IADD3 R3, R2, R1, RZ ;             /* 0x0000000102030210 */
                                                                      /* 0x004fe20007ffe0ff */
        /*0030*/               @P3 BRA 0x10 ;                         /* 0xfffffff800303947 */
                                                                      /* 0x000fea000383ffff */
        /*0040*/                   EXIT ;                             /* 0x000000000000794d */
                                                                      /* 0x000fea0003800000 */
"""


@pytest.mark.parametrize(("size", "groups"), [(1, 1), (6, 3), (64, 64), (257, 8), (1000, 64)])
def test_the_search_in_torch_finds_the_levels_of_the_specification(size: int, groups: int):
    lengths = -np.sort(-np.random.default_rng(size).lognormal(5, 1.4, (3, size)).astype(np.int64) - 1, axis=1)
    f = np.empty(lengths.shape, np.int64)
    expected = []
    for row, out in zip(lengths, f, strict=True):
        spec.scale_lengths(row, alpha_table(1e-4), out)
        counts = np.empty(groups, np.int64)
        expected.append(spec.min_max(out, 1.0 / out, np.full(size, size, np.int64), groups, counts))
    assert min_max_levels(torch.from_numpy(f), groups).tolist() == expected


def test_a_disassembly_is_read_with_its_control_bits():
    code = read_code(SASS)
    assert [each.name for each in code.rest] == ["MOV", "EXIT"]
    assert [each.name for each in code.loop] == ["LDG", "IADD3", "BRA"]
    mov, load, add = code.rest[0], code.loop[0], code.loop[1]
    assert (mov.stall, mov.writes, mov.reads, mov.waits) == (2, 7, 7, 0)
    assert (load.stall, load.writes, load.reads, load.waits) == (2, 2, 7, 0)
    assert (add.stall, add.writes, add.reads, add.waits) == (1, 7, 7, 0b100)


def test_a_warp_waits_for_its_loads_and_its_scheduler():
    load = Instruction(0, "LDG", None, 2, 2, 7, 0)
    use = Instruction(16, "IADD3", None, 4, 7, 7, 0b100)
    assert cycles((load, use), 1, 1) == 38 + 4
    assert cycles((load, use), 100, 1) == 100 * 42
    assert cycles((load,), 10, 4) == 20
    assert cycles((load,), 10, 16) == 40
    assert cycles((), 10, 4) == 0
