"""The whole planner on the GPU against the specification, bit for bit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter
from against_spec import Case, alphas, assert_same_plan, few, giant, plan_by_kernels, skewed

from gpusampler.errors import ParameterError
from gpusampler.kernels import engine, spec
from gpusampler.kernels.shuffle import shuffle_places

CASES = {
    "one sample": Case(few(1), 1, 1),
    "two samples": Case(skewed(2), 2, 1),
    "one slot": Case(skewed(63, rows=1), 5, 1),
    "one slot, block": Case(few(64), 8, 1, per_step=True),
    "one slot, capped": Case(skewed(65, rows=3), 4, 1, max_tokens=20000),
    "K == B": Case(skewed(6), 3, 2),
    "giant": Case(giant(14, rows=1), 2, 2),
    "ties": Case(few(21, rows=1), 2, 3),
    "many samples a group": Case(skewed(40, rows=1, seed=5), 2, 2),
    "hardly more samples than groups": Case(2 ** skewed(14, rows=2, seed=6).clip(4, 12), 3, 4),
    "per step": Case(skewed(30, rows=1), 2, 2, per_step=True),
    "per step, ties": Case(few(9, rows=1), 2, 3, per_step=True),
    "three ranks": Case(skewed(20, seed=3), 3, 2),
    "custom": Case(skewed(20, seed=4), 2, 2, custom=np.sqrt(skewed(20, seed=4))),
    "custom, per step, capped": Case(skewed(17), 1, 2, 9000, True, skewed(17) ** 1.7),
    "a cap that some rows break": Case(np.concatenate([few(12), skewed(12)]), 2, 2, max_tokens=2000),
    "steep": Case(skewed(16, rows=1), 2, 2, alpha=1.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_plan_of_the_specification(case: Case):
    plan = assert_same_plan(case)
    lengths = torch.from_numpy(case.lengths)
    for w in (plan.status == spec.OK).nonzero()[:, 0].tolist():
        counted = torch.bincount(plan.order[w].long(), minlength=lengths.shape[1])
        assert counted.tolist() == [1] * lengths.shape[1]
        groups = plan.order[w].long().tensor_split(plan.offsets[w, 1:-1].long())
        tokens = [len(group) * int(lengths[w, group].max()) for group in groups]
        assert tokens == plan.tokens[w].flatten().tolist()
        if case.max_tokens:
            assert all(total <= case.max_tokens or len(group) == 1 for total, group in zip(tokens, groups, strict=True))
        heights = plan.costs[w].sum(0).max() if case.per_step else plan.costs[w].amax(1).sum()
        assert float(heights) == pytest.approx(float(plan.bounds[w, 1]), rel=1e-12)
        assert plan.bounds[w, 0] <= plan.bounds[w, 1] * (1 + 1e-12)


def test_L15_the_plan_of_costs_above_a_float32():
    case = Case(np.array([[1048576, 1048575] * 512]), 8, 4)
    plan = assert_same_plan(case)
    assert int(plan.tokens.sum()) >= int(case.lengths.sum())


def test_L54_the_kernels_refuse_what_they_cannot_do():
    with pytest.raises(ParameterError, match=r"dp_size \* grad_accum = 5000 is above 2048"):
        plan_by_kernels(Case(skewed(5000), 5000, 1))
    assert "cuda devices, not on meta" in str(engine.obstacle(torch.device("meta"), 1, 1))


def test_L54_cpu_tensors_without_the_interpreter():
    code = "import torch; from gpusampler.kernels import engine; print(engine.obstacle(torch.device('cpu'), 1, 1))"
    shown = subprocess.run(
        [sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True, timeout=120
    )
    assert "TRITON_INTERPRET=1" in shown.stdout


def test_int32_lengths():
    case = CASES["three ranks"]
    narrow = torch.from_numpy(case.lengths).to(torch.int32)
    table = torch.from_numpy(alphas())
    arguments = (None, table, case.dp_size, case.slots, 0, False)
    for got, wide in zip(engine.plan_rows(narrow, *arguments), plan_by_kernels(case), strict=True):
        assert torch.equal(got, wide)


def test_no_rows():
    plan = plan_by_kernels(Case(np.zeros((0, 4), np.int64), 2, 1))
    assert plan.order.shape == (0, 4)
    assert plan.status.shape == (0,)


@pytest.mark.parametrize("per_step", [False, True])
def test_programs_in_any_order(program_order: str, per_step: bool):
    assert_same_plan(Case(few(10, rows=3), 1, 2, per_step=per_step))


def test_row_offsets_beyond_2_to_31(monkeypatch: pytest.MonkeyPatch):
    """Rows 2**29 and on of tensors whose first 2**29 rows are not there: all offsets are above 2**31."""
    skipped, rows = 2**29, 3
    convert = interpreter._implicit_cvt

    def moved_back(argument: object) -> object:
        converted = convert(argument)
        if isinstance(argument, torch.Tensor) and argument.ndim > 0 and len(argument) == rows:
            back = skipped * argument[0].numel() * argument.element_size()
            converted.handle.data -= np.uint64(back)
        return converted

    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx

    def moved_on(x: int, y: int, z: int) -> None:
        place(x, y, z)
        builder.grid_idx = (x + skipped, y, z)

    monkeypatch.setattr(interpreter, "_implicit_cvt", moved_back)
    monkeypatch.setattr(builder, "set_grid_idx", moved_on)
    assert_same_plan(Case(skewed(9, rows=rows), 1, 1))
    assert_same_plan(Case(skewed(9, rows=rows), 1, 2, per_step=True))


def test_places_beyond_2_to_31_are_those_of_the_specification():
    keys = spec.round_keys(3, 4)
    out = np.empty(4, np.int64)
    spec.shuffle(2**34, keys, 2**35, out)
    assert shuffle_places(2**34, 4, keys, 2**35, "cpu").tolist() == out.tolist()
