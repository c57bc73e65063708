"""`plan_batches` and `BatchPlan`: what goes in, what comes out, and that rows do not touch each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusampler import BatchPlan, CostModel, plan_batches
from gpusampler.errors import NotAvailableError, ParameterError
from gpusampler.plan import Partition
from helpers import half_square

FIELDS = [field.name for field in dataclasses.fields(BatchPlan) if not field.name.startswith("_")]
COSTS = {
    "default": CostModel(),
    "linear": CostModel(alpha=0.0),
    "steep": CostModel(alpha=0.5, intercept=10.0),
    "function": CostModel(cost_fn=half_square),
}


def default_cost(lengths: torch.Tensor) -> torch.Tensor:
    wide = lengths.to(torch.float64)
    return wide + 1e-4 * wide * wide


def linear_cost(lengths: torch.Tensor) -> torch.Tensor:
    return lengths


def draw_rows(num_rows: int, size: int, seed: int = 0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    rows = np.exp(draw.normal(6, 1, (num_rows, size))).astype(np.int64).clip(1, 50_000)
    rows[0] = 7
    return torch.from_numpy(rows)


def assert_equal(a: BatchPlan, b: BatchPlan) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_worked_example():
    # 8 7 2 1 1 1 with cost n * longest: {8} and {7, ...} is 8 | 35, {8 7} is 16 | 8, {8 7 2} is 24 | 3
    plan = plan_batches(torch.tensor([[8, 1, 2, 7, 1, 1]]), dp_size=2, cost=CostModel(alpha=0.0))
    assert plan.order.tolist() == [[0, 3, 2, 1, 4, 5]]
    assert plan.offsets.tolist() == [[0, 2, 6]]
    assert plan.costs.tolist() == [[[16.0, 8.0]]]
    assert plan.tokens.tolist() == [[[16, 8]]]
    assert plan.lower_bound.tolist() == [10.0]  # 20 in all over two ranks
    assert plan.step_cost.tolist() == [16.0]


@pytest.mark.parametrize("sync", ["microbatch", "step"])
@pytest.mark.parametrize("cost", COSTS)
def test_shapes_dtypes_and_what_they_say(cost: str, sync: str):
    rows = draw_rows(5, 40)
    plan = plan_batches(rows, 3, 4, cost=COSTS[cost], sync=sync)
    shapes = [(5, 40), (5, 13), (5, 4, 3), (5, 4, 3), (5,), (5,), (5,)]
    dtypes = [torch.int32, torch.int32, torch.float64, torch.int64, torch.float64, torch.float64, torch.int64]
    for name, shape, dtype in zip(FIELDS, shapes, dtypes, strict=True):
        tensor = getattr(plan, name)
        assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == (shape, dtype, "cpu")
        assert tensor.is_contiguous()
    assert (len(plan), plan.grad_accum, plan.dp_size) == (5, 4, 3)
    for w in range(5):
        assert sorted(plan.order[w].tolist()) == list(range(40))
        for slot in range(4):
            for rank in range(3):
                lengths = rows[w][plan.microbatch(w, slot, rank)]
                assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)
                assert plan.tokens[w, slot, rank] == len(lengths) * lengths[0]
                expected = COSTS[cost].intercept + len(lengths) * COSTS[cost](lengths[:1])[0]
                assert plan.costs[w, slot, rank].item() == pytest.approx(expected.item(), rel=1e-6)
    table = plan.costs
    expected = table.amax(dim=2).sum(dim=1) if sync == "microbatch" else table.sum(dim=1).amax(dim=1)
    torch.testing.assert_close(plan.step_cost, expected, rtol=1e-12, atol=0)
    assert (plan.lower_bound <= plan.step_cost).all()
    per_sample = COSTS[cost](rows)
    bound = 4 * COSTS[cost].intercept + torch.maximum(per_sample.sum(dim=1) / 3, per_sample.amax(dim=1))
    torch.testing.assert_close(plan.lower_bound, bound, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sync", ["microbatch", "step"])
@pytest.mark.parametrize("cost", COSTS)
def test_rows_do_not_depend_on_each_other(cost: str, sync: str):
    rows = draw_rows(9, 48, seed=1)
    options: dict[str, Any] = {"cost": COSTS[cost], "sync": sync}
    together = plan_batches(rows, 2, 3, **options)
    for first, last in ((0, 1), (4, 5), (8, 9), (0, 4), (3, 9)):
        part = plan_batches(rows[first:last], 2, 3, **options)
        for name in FIELDS:
            assert torch.equal(getattr(part, name), getattr(together, name)[first:last]), (name, first)
    backwards = plan_batches(rows.flip(0), 2, 3, **options)
    for name in FIELDS:
        assert torch.equal(getattr(backwards, name).flip(0), getattr(together, name)), name


@pytest.mark.parametrize("sync", ["microbatch", "step"])
def test_the_order_within_a_row_decides_ties_only(sync: str):
    rows = draw_rows(4, 60, seed=2)
    mixed = rows[:, torch.randperm(60, generator=torch.Generator().manual_seed(0))]
    a, b = plan_batches(rows, 3, 2, sync=sync), plan_batches(mixed, 3, 2, sync=sync)
    assert torch.equal(rows.gather(1, a.order.long()), mixed.gather(1, b.order.long()))
    for name in FIELDS[1:]:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64]
)
def test_every_integer_dtype_gives_the_same_plan(dtype: torch.dtype):
    rows = torch.arange(1, 121).reshape(3, 40)
    assert_equal(plan_batches(rows.to(dtype), 2, 2), plan_batches(rows, 2, 2))


def test_strides_do_not_matter_and_input_is_left_alone():
    rows = draw_rows(40, 6)
    expected = plan_batches(rows.t().contiguous(), 2, 2)
    before = rows.clone()
    assert_equal(plan_batches(rows.t(), 2, 2), expected)
    assert_equal(plan_batches(rows.t().numpy(), 2, 2), expected)
    assert_equal(plan_batches(rows.t().repeat_interleave(2, dim=1)[:, ::2], 2, 2), expected)
    assert torch.equal(rows, before)
    fixed = torch.tensor([[5]]).expand(2, 8)
    assert_equal(plan_batches(fixed, 2, 2), plan_batches(fixed.clone(), 2, 2))


def test_no_rows():
    plan = plan_batches(torch.empty((0, 12), dtype=torch.int64), 2, 2, cost=CostModel(cost_fn=half_square))
    assert len(plan) == 0
    assert plan.order.shape == (0, 12)
    assert plan.costs.shape == (0, 2, 2)


@pytest.mark.parametrize("sync", ["microbatch", "step"])
def test_the_same_function_gives_the_same_plan(sync: str):
    rows = draw_rows(6, 64, seed=3)
    own = CostModel(cost_fn=default_cost)
    assert_equal(
        dataclasses.replace(plan_batches(rows, 8, 1, cost=own, sync=sync), **_floats(rows, 8, 1, sync)),
        plan_batches(rows, 8, 1, sync=sync),
    )
    a, b = plan_batches(rows, 4, 4, cost=own, sync=sync), plan_batches(rows, 4, 4, sync=sync)
    torch.testing.assert_close(a.lower_bound, b.lower_bound, rtol=1e-9, atol=0)
    torch.testing.assert_close(a.step_cost, b.step_cost, rtol=0.02, atol=0)
    linear = plan_batches(rows, 4, 4, cost=CostModel(alpha=0.0), sync=sync)
    assert_equal(plan_batches(rows, 4, 4, cost=CostModel(cost_fn=linear_cost), sync=sync), linear)


def _floats(rows: torch.Tensor, dp_size: int, grad_accum: int, sync: str) -> dict[str, torch.Tensor]:
    """The float fields under the default cost; a function is rounded to other integers in the last digits."""
    plan = plan_batches(rows, dp_size, grad_accum, sync=sync)
    return {name: getattr(plan, name) for name in FIELDS if getattr(plan, name).is_floating_point()}


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from(["microbatch", "step"]))
def test_a_cap_is_kept_or_refused(dp_size: int, grad_accum: int, seed: int, sync: str):
    draw = np.random.default_rng(seed)
    size = dp_size * grad_accum * int(draw.integers(1, 8))
    rows = torch.from_numpy(draw.integers(1, 200, (3, size)))
    cap = int(draw.integers(200, 2000))
    options: dict[str, Any] = {"sync": sync, "max_tokens": cap}
    try:
        plan = plan_batches(rows, dp_size, grad_accum, **options)
    except ParameterError as error:
        needed = int(str(error).split("at least ")[1].split()[0])
        assert needed > dp_size * grad_accum
        row = int(str(error).split("row ")[1].split(":")[0])
        more = min(needed, size)
        assert plan_batches(rows[row : row + 1], more, 1, **options).tokens.max() <= cap
        with pytest.raises(ParameterError, match="cannot be met in row 0"):
            plan_batches(rows[row : row + 1], more - 1, 1, **options)
    else:
        assert plan.tokens.max() <= cap
        assert (plan.offsets.diff(dim=1) >= 1).all()


def test_a_cap_that_binds_nothing_changes_nothing():
    rows = draw_rows(4, 64, seed=4)
    free = plan_batches(rows, 4, 4)
    assert_equal(plan_batches(rows, 4, 4, max_tokens=64 * int(rows.max())), free)
    assert_equal(plan_batches(rows, 4, 4, max_tokens=2**63 - 1), free)


def test_the_intercept_changes_costs_only():
    rows = draw_rows(4, 64, seed=5)
    plain, more = plan_batches(rows, 4, 4), plan_batches(rows, 4, 4, cost=CostModel(intercept=123.5))
    assert torch.equal(plain.tokens, more.tokens)
    torch.testing.assert_close(more.costs, plain.costs + 123.5, rtol=1e-12, atol=0)
    torch.testing.assert_close(more.step_cost, plain.step_cost + 4 * 123.5, rtol=1e-12, atol=0)
    torch.testing.assert_close(more.lower_bound, plain.lower_bound + 4 * 123.5, rtol=1e-12, atol=0)


def test_step_sync_costs_no_more():
    rows = draw_rows(16, 128, seed=6)
    apart, once = plan_batches(rows, 4, 4), plan_batches(rows, 4, 4, sync="step")
    assert (once.step_cost <= apart.step_cost).all()
    assert torch.equal(once.lower_bound, apart.lower_bound)
    # costliest first for every rank
    assert (once.costs[:, :-1] >= once.costs[:, 1:]).all()
    # costliest slot first
    assert (apart.costs[:, :-1].amin(dim=2) >= apart.costs[:, 1:].amax(dim=2)).all()


def test_costs_may_be_flat_steps_or_of_any_dtype():
    rows = draw_rows(3, 48, seed=7)
    flat = plan_batches(rows, 4, 3, cost=CostModel(cost_fn=torch.ones_like))
    assert flat.step_cost.tolist() == [12.0] * 3  # four samples a group
    assert flat.lower_bound.tolist() == [12.0] * 3
    buckets = CostModel(cost_fn=lambda n: (n + 127) // 128 * 128)
    expected = CostModel(cost_fn=lambda n: ((n + 127) // 128 * 128).to(torch.float32))
    assert_equal(plan_batches(rows, 4, 3, cost=buckets), plan_batches(rows, 4, 3, cost=expected))


ONE_ROW = [[3, 1, 4, 1, 5, 9]]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([[1, 2]], r"lengths must be an integer tensor \[W, B\], got \[\[1, 2\]\]"),
        (None, "lengths must be an integer tensor"),
        (torch.tensor([1, 2, 3]), r"lengths must have shape \[W, B\], got \(3,\); one batch is lengths\[None\]"),
        (torch.ones(1, 2, 3, dtype=torch.int64), r"got \(1, 2, 3\)"),
        (torch.ones(2, 3), "integer dtype, got torch.float32"),
        (torch.ones(2, 3, dtype=torch.bool), "integer dtype, got torch.bool"),
        (torch.ones(2, 3, dtype=torch.complex64), "integer dtype, got torch.complex64"),
        (torch.tensor([[1, 2], [3, 0]]), r"got lengths\[1, 1\] = 0"),
        (torch.tensor([[1, 2], [-3, 0]]), r"got lengths\[1, 0\] = -3"),
        (torch.tensor([[1, 2], [2**31, 1]]), r"from 1 to 2147483647, got lengths\[1, 0\] = 2147483648"),
        (torch.tensor([[1], [2]]), r"dp_size \* grad_accum = 2 columns, got 1"),
        (torch.empty((3, 0), dtype=torch.int64), "columns, got 0"),
    ],
)
def test_bad_lengths_are_named(lengths: Any, message: str):
    with pytest.raises(ParameterError, match=message):
        plan_batches(lengths, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_size": 0}, "dp_size must be at least 1, got 0"),
        ({"dp_size": True}, "dp_size must be an int, got True"),
        ({"dp_size": 2.0}, "dp_size must be an int, got 2.0"),
        ({"grad_accum": -1}, "grad_accum must be at least 1, got -1"),
        ({"grad_accum": 4}, r"dp_size \* grad_accum = 8 columns, got 6"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": float("inf")}, "max_tokens must be an int, got inf"),
        ({"max_tokens": 8}, r"from 1 to max_tokens 8, got lengths\[0, 5\] = 9"),
        ({"max_tokens": 10}, "max_tokens=10 cannot be met in row 0: it needs at least 3 micro-batches"),
        ({"cost": 1e-3}, "cost must be a CostModel, got 0.001"),
        ({"sync": "slot"}, "sync must be one of 'microbatch', 'step', got 'slot'"),
        ({"layout": "flat"}, "layout must be one of"),
    ],
)
def test_bad_parameters_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ParameterError, match=message):
        plan_batches(torch.tensor(ONE_ROW), **{"dp_size": 2, **options})


def test_lengths_without_data_are_refused():
    with pytest.raises(ParameterError, match="lengths must hold data, got a tensor on the meta device"):
        plan_batches(torch.ones(1, 4, dtype=torch.int64, device="meta"), 2)


def test_layouts_to_come_say_so():
    with pytest.raises(NotAvailableError, match="layout='packed' is not available yet"):
        plan_batches(torch.tensor(ONE_ROW), 2, layout="packed")


@pytest.mark.parametrize("index", [(3, 0, 0), (-1, 0, 0), (0, 2, 0), (0, 0, 2), (0, 0, -1), (0.0, 0, 0)])
def test_micro_batches_out_of_range_are_refused(index: tuple[Any, int, int]):
    plan = plan_batches(draw_rows(3, 8), 2, 2)
    with pytest.raises(ParameterError, match=r"^(w|slot|rank) must be"):
        plan.microbatch(*index)


def test_lengths_too_long_for_integers_are_refused():
    with pytest.raises(ParameterError, match=r"lengths up to 2147483647 in batches of 4 with alpha 0.0001 exceed"):
        plan_batches(torch.tensor([[1, 1, 1, 2**31 - 1]]), 2)
    plan = plan_batches(torch.tensor([[1, 1, 1, 2**31 - 1]]), 2, cost=CostModel(alpha=0.0))
    assert plan.tokens.tolist() == [[[2**31 - 1, 3]]]


def test_a_partition_takes_its_groups_and_numpy_integers():
    partition = Partition(np.int64(2), np.int32(3), max_tokens=np.int64(9))
    assert (partition.groups, type(partition.dp_size), type(partition.max_tokens)) == (6, int, int)
    with pytest.raises(dataclasses.FrozenInstanceError):
        partition.dp_size = 4
