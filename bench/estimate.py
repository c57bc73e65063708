"""Times of the kernels on a GPU that is not there, from the compiled code. Estimates: nothing here was measured.

Latency of one row: the assembler writes into every instruction how long to stall and which results to wait for, so a
warp's walk through the code can be followed cycle by cycle, given how long loads and other operations of no fixed
latency take (`CYCLES`). The hot loop of a kernel, its largest innermost one, is followed until its turns take the same
time, and counted as often as a plan takes it; the rest counts once; a launch in a CUDA graph is added. Where the warps
of a program fill a scheduler, its issue slots are the limit instead. Throughput of many rows: instructions issued by
all warps at half of the peak rate of an H200. Memory beyond the first-level cache is left out: a row of 4096 samples
is 115 KB.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from bench.compile_stats import compile_ahead, read_cubin
from gpusampler.kernels import launch, spec
from gpusampler.kernels.catalog import Variant, variants
from gpusampler.kernels.sort import key_bits
from gpusampler.kernels.waste import digits

CHIP = 90
CLOCK_GHZ = 1.98
MULTIPROCESSORS = 132
SCHEDULERS = 4
ISSUE_A_CLOCK = SCHEDULERS * 0.5
LAUNCH_MICROSECONDS = 1.5
LONGEST = 131072
"""Longest length allowed in the rows that are estimated."""
CYCLES = {"LDG": 38, "LDS": 30, "SHFL": 24, "BAR": 24, "F2I": 20, "I2F": 20, "DMUL": 16, "MUFU": 24, "CALL": 150}
"""Cycles of operations that are waited for; loads that hit the first-level cache."""
OTHER_CYCLES = 20
_NO_BARRIER = 7
_STEADY = 4


class Instruction(NamedTuple):
    """One instruction, with what its control bits say."""

    address: int
    name: str
    target: int | None
    stall: int
    writes: int
    reads: int
    waits: int


class Code(NamedTuple):
    """Instructions of a kernel: those of its hot loop, and the others."""

    loop: tuple[Instruction, ...]
    rest: tuple[Instruction, ...]


class Step(NamedTuple):
    """A kernel of a plan.

    Attributes:
        variant: of the kernel.
        launches: in one plan.
        programs: of one row and launch.
        steps: turns of the hot loop, a launch.
    """

    variant: Variant
    launches: int
    programs: int
    steps: int


class Estimate(NamedTuple):
    """What one kernel takes of a plan."""

    kernel: str
    launches: int
    programs: int
    warps: int
    steps: int
    microseconds: float
    many_rows_microseconds: float
    """Issue time of one row when all multiprocessors are busy."""


_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)[. ;]([^;]*);?\s*"
    r"/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/"
)


def read_code(sass: str) -> Code:
    """Split a disassembly at its loops, found by branches backwards.

    The control bits of an instruction are the 21 above bit 105: 4 of stalls, 1 of no use here, 3 and 3 for the barrier
    that its result and its operands hold, 6 for the barriers that it waits for.
    """
    code = []
    for address, name, text, high in _LINE.findall(sass):
        control = int(high, 16) >> 41
        jump = re.search(r"0x([0-9a-f]+)", text) if name == "BRA" else None
        barriers = (control >> 5 & 7, control >> 8 & 7, control >> 11 & 63)
        code.append(Instruction(int(address, 16), name, int(jump[1], 16) if jump else None, control & 15, *barriers))
    loops = [(each.target, each.address) for each in code if each.target is not None and each.target < each.address]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    first, last = max(inner, key=lambda loop: loop[1] - loop[0], default=(-1, -1))
    inside = [first <= each.address <= last for each in code]
    return Code(
        tuple(each for each, within in zip(code, inside, strict=True) if within),
        tuple(each for each, within in zip(code, inside, strict=True) if not within),
    )


def cycles(code: tuple[Instruction, ...], turns: int, warps: int) -> float:
    """Cycles that a warp takes for `turns` runs through the code; those after the first few take equally long."""
    ready = [0] * 6
    now, ends = 0, []
    for _ in range(min(turns, _STEADY)):
        for each in code:
            now = max([now, *(ready[barrier] for barrier in range(6) if each.waits >> barrier & 1)])
            latency = CYCLES.get(each.name, OTHER_CYCLES)
            for barrier in {each.writes, each.reads} - {_NO_BARRIER}:
                ready[barrier] = max(ready[barrier], now + latency)
            now += max(1, each.stall)
        ends.append(now)
    if not ends:
        return 0.0
    steady = ends[-1] - ends[-2] if turns > _STEADY else 0
    issue = len(code) * turns * max(1.0, warps / SCHEDULERS)
    return max(float(ends[-1] + (turns - len(ends)) * steady), issue)


@cache
def _code(kernel: str, label: str) -> Code:
    variant = next(each for each in variants(CHIP) if (each.name, each.label) == (kernel, label))
    return read_code(read_cubin(compile_ahead(variant, CHIP).asm["cubin"])[1])


def _exchanges(size: int) -> int:
    bits = max(6, (size - 1).bit_length())
    return bits * (bits + 1) // 2


def plan_steps(size: int, dp_size: int, slots: int, min_max_turns: int, waste_turns: int) -> list[Step]:
    """Every kernel that plans a row of `size` samples for ranks that meet in every slot.

    Args:
        size: samples, B; at most 16384.
        dp_size: ranks, D.
        slots: accumulation slots, G.
        min_max_turns: turns of the min-max search.
        waste_turns: turns of the equal-waste search.
    """
    groups = dp_size * slots
    many = slots > 2 and groups <= spec.SMALL_K
    lanes = (spec.MANY_CANDIDATES if many else spec.CANDIDATES) * len(spec.TARGETS)
    walk = launch.walk_shape(slots)
    turns = -(-size // launch.COSTS.block)
    block = launch.group_shape(groups).block
    ranks = (dp_size - 1).bit_length()
    packed = key_bits(size, LONGEST) < 31
    sort = launch.sort_shape(size, 4 if packed else 8, launch.SHARED_BYTES[CHIP])
    if sort is None:
        raise ValueError(f"size must be one that a program sorts, got {size}")
    plan = [
        _step("sort_rows", {"PACKED": packed, "BLOCK": sort.block}, 1, 1, _exchanges(size)),
        _step("costs", {"CUSTOM": False}, 1, 1, turns),
        _step("min_max", {}, 1, 1, min_max_turns * groups),
        _step("deal", {"BLOCK": block}, 1, 1, _exchanges(groups) + slots * ranks * (ranks + 1) // 2),
        _step("places", {"BLOCK": block}, 1, 1, 1),
        _step("copy", {}, 1, groups, 1),
    ]
    if slots > 1 and size < spec.SCARCE * groups:
        plan.insert(3, _step("fill", {}, 1, len(spec.RAISES), min_max_turns * groups * (slots + 1) // 2))
    if slots > 1:
        plan[3:3] = [
            _step("limit", {}, 1, turns, 1),
            _step("waste", {}, 1, len(spec.WASTE_CAPS), waste_turns * groups * digits(size, groups)),
            _step("start", {"BLOCK": block}, 1, 1, (1 + len(spec.WASTE_CAPS)) * _exchanges(groups)),
            _step("walk", {"SLOTS": walk.slots}, spec.ROUNDS, -(-lanes // walk.lanes), groups),
            _step("settle", {"BLOCK": block}, spec.ROUNDS, 1, _exchanges(groups)),
        ]
    return plan


def _step(name: str, constants: dict[str, int], launches: int, programs: int, steps: int) -> Step:
    variant = next(v for v in variants(CHIP) if v.name == name and constants.items() <= v.constants.items())
    return Step(variant, launches, programs, steps)


def estimate(plan: list[Step]) -> list[Estimate]:
    """Times of the kernels of a plan."""
    return [_of_step(*step) for step in plan]


def _of_step(variant: Variant, launches: int, programs: int, steps: int) -> Estimate:
    code, warps = _code(variant.name, variant.label), variant.num_warps
    one = cycles(code.rest, 1, warps) + cycles(code.loop, steps, warps)
    issued = (len(code.rest) + steps * len(code.loop)) * warps * programs
    return Estimate(
        variant.name,
        launches,
        programs,
        warps,
        steps,
        launches * (LAUNCH_MICROSECONDS + one / (CLOCK_GHZ * 1e3)),
        launches * issued / (ISSUE_A_CLOCK * MULTIPROCESSORS * CLOCK_GHZ * 1e3),
    )
