"""Turns of the searches on the GPU, counted under Triton's interpreter: `python -m bench.turns B D G [B D G ...]`.

The lengths are those of the kernels bench, three rows of each shape; a line of JSON holds the most turns of any row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bench.record import ROOT

Shape = tuple[int, int, int]
ROWS = 3


def count_turns(shapes: list[Shape]) -> dict[Shape, tuple[int, int]]:
    """Turns of the min-max and of the equal-waste search for each (B, D, G), counted in a process of its own."""
    command = [sys.executable, "-m", "bench.turns", *(str(number) for shape in shapes for number in shape)]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    shown = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    return {shape: (found[0], found[1]) for shape, found in zip(shapes, json.loads(shown), strict=True)}


def _count(size: int, dp_size: int, slots: int) -> tuple[int, int]:
    """Run both searches on row after row, and count."""
    import torch

    from bench.kernels import make_inputs
    from gpusampler.kernels import search, spec, waste
    from gpusampler.kernels.checks import MAX_LENGTH
    from gpusampler.kernels.costs import scale_rows
    from gpusampler.kernels.sort import sort_rows

    groups = dp_size * slots
    lengths, alphas = make_inputs(ROWS, size)
    most = [0, 0]
    turns = [0, 0]
    search._spread = _counted(search._spread, turns, 0)
    waste._node = _counted(waste._node, turns, 1)
    for row in torch.from_numpy(lengths).split(1):
        counts = torch.empty((1, 1 + len(spec.WASTE_CAPS), groups), dtype=torch.int32)
        usable = torch.empty((1, 1 + len(spec.WASTE_CAPS)), dtype=torch.int32)
        status, peak = torch.empty((2, 1), dtype=torch.int64)
        by_length = sort_rows(row, MAX_LENGTH, 1 << 17)
        costs = scale_rows(row, None, torch.from_numpy(alphas), 0, MAX_LENGTH, by_length, status)
        turns[:] = 0, 0
        search.min_max(costs, groups, counts, status, peak)
        most[0] = max(most[0], turns[0])
        if slots > 1:
            waste.limit_peak(costs, groups, status, peak)
            for cap in spec.WASTE_CAPS:
                turns[1] = 0
                waste.equal_waste(costs, groups, status, torch.tensor([cap]), counts, usable)
                most[1] = max(most[1], turns[1])
    return most[0], most[1]


def _counted(function: Callable[..., Any], turns: list[int], which: int) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        turns[which] += 1
        return function(*arguments, **options)

    return counted


if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[1:]]
    print(json.dumps([_count(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]))
