"""Times of the kernels on a GPU that is not there, from the compiled code. Estimates: nothing here was measured.

Latency of one row: the instructions of a kernel's hot loop, each at the cycles below as if all waited for one another,
times the steps that a plan takes, plus the rest of the kernel once, plus a launch in a CUDA graph. Throughput of many
rows: instructions issued by all warps, at half of the peak rate of an H200. Both leave out memory beyond the
first-level cache: a row of 4096 samples is 115 KB.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

from bench.compile_stats import read_cubin
from gpusampler.kernels import launch, spec
from gpusampler.kernels.catalog import Variant, variants
from gpusampler.kernels.sort import key_bits

CHIP = 90
CLOCK_GHZ = 1.98
MULTIPROCESSORS = 132
ISSUE_A_CLOCK = 4 * 0.5
LAUNCH_MICROSECONDS = 1.5
MAX_LENGTH = 131072
"""Longest length allowed in the rows that are estimated."""
TURNS = 4
"""Turns of the min-max and equal-waste searches, an assumption, not a count."""
CYCLES = {"LDG": 38, "LDS": 30, "SHFL": 24, "BAR": 24, "F2I": 20, "I2F": 20, "DMUL": 16, "CALL": 150}
OTHER_CYCLES = 4.5


class Code(NamedTuple):
    """Instructions of a kernel by opcode: those of its hot loop, the largest innermost one, and the others."""

    loop: Counter[str]
    rest: Counter[str]


class Estimate(NamedTuple):
    """One kernel of a plan."""

    kernel: str
    launches: int
    programs: int
    warps: int
    steps: int
    microseconds: float
    many_rows_microseconds: float
    """Issue time of one row when all multiprocessors are busy."""


def read_code(sass: str) -> Code:
    """Split a disassembly at its loops, found by branches backwards."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)[. ;]([^;]*)", sass)
    code = [(int(address, 16), name, text) for address, name, text in lines]
    loops = []
    for address, name, text in code:
        target = re.search(r"0x([0-9a-f]+)", text) if name == "BRA" else None
        if target and int(target[1], 16) < address:
            loops.append((int(target[1], 16), address))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    first, last = max(inner, key=lambda loop: loop[1] - loop[0], default=(-1, -1))
    loop = Counter(name for address, name, _ in code if first <= address <= last)
    rest = Counter(name for address, name, _ in code if not first <= address <= last)
    return Code(loop, rest)


def _cycles(counts: Counter[str]) -> float:
    return sum(number * CYCLES.get(name, OTHER_CYCLES) for name, number in counts.items())


def _compile(variant: Variant) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(variant.function, variant.signature, variant.constants)
    options: dict[str, Any] = {"num_warps": variant.num_warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", CHIP, 32), options=options)
    return read_code(read_cubin(compiled.asm["cubin"])[1])


def _stages(size: int) -> int:
    bits = max(6, (size - 1).bit_length())
    return bits * (bits + 1) // 2


def estimate(size: int, dp_size: int, slots: int) -> list[Estimate]:
    """Every kernel that plans a row of `size` samples for ranks that meet in every slot."""
    groups = dp_size * slots
    many = slots > 2 and groups <= spec.SMALL_K
    lanes = (spec.MANY_CANDIDATES if many else spec.CANDIDATES) * len(spec.TARGETS)
    walk = launch.walk_shape(slots)
    digits = ((size - groups).bit_length() + 3) // 4
    turns = -(-size // launch.COSTS.block)
    packed = key_bits(size, MAX_LENGTH) < 31
    sort = launch.sort_shape(size, 4 if packed else 8, launch.SHARED_BYTES[CHIP])
    block = launch.group_shape(groups).block
    ranks = (dp_size - 1).bit_length()
    # kernel, what tells its variant, launches, programs of a row, steps of the hot loop a launch
    plan: list[tuple[str, dict[str, int], int, int, int]] = [
        ("costs", {"CUSTOM": 0}, 1, 1, turns),
        ("min_max", {}, 1, 1, TURNS * groups),
        ("deal", {"BLOCK": block}, 1, 1, _stages(groups) + slots * ranks * (ranks + 1) // 2),
        ("places", {"BLOCK": block}, 1, 1, 1),
        ("copy", {}, 1, groups, 1),
    ]
    if sort is not None:
        plan.insert(0, ("sort_rows", {"PACKED": packed, "BLOCK": sort.block}, 1, 1, _stages(size)))
    if slots > 1:
        plan[3:3] = [
            ("limit", {}, 1, turns, 1),
            ("waste", {}, 1, len(spec.WASTE_CAPS), TURNS * groups * digits),
            ("start", {"BLOCK": block}, 1, 1, (1 + len(spec.WASTE_CAPS)) * _stages(groups)),
            ("walk", {"SLOTS": walk.slots}, spec.ROUNDS, -(-lanes // walk.lanes), groups),
            ("settle", {"BLOCK": block}, spec.ROUNDS, 1, _stages(groups)),
        ]
    return [_of_kernel(*entry) for entry in plan]


def _of_kernel(name: str, constants: dict[str, int], launches: int, programs: int, steps: int) -> Estimate:
    variant = next(v for v in variants(CHIP) if v.name == name and constants.items() <= v.constants.items())
    code = _compile(variant)
    cycles = _cycles(code.rest) + steps * _cycles(code.loop)
    issued = (code.rest.total() + steps * code.loop.total()) * variant.num_warps * programs
    return Estimate(
        name,
        launches,
        programs,
        variant.num_warps,
        steps,
        launches * (LAUNCH_MICROSECONDS + cycles / (CLOCK_GHZ * 1e3)),
        launches * issued / (ISSUE_A_CLOCK * MULTIPROCESSORS * CLOCK_GHZ * 1e3),
    )
