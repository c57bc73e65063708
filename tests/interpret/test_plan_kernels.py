"""`plan_batches` and the sampler on the kernels: the CPU engine's plans, and its reasons where there is none."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from against_spec import few, giant, skewed
from torch.utils.data import DataLoader

from gpusampler import BatchPlan, CostModel, GPUBatchRebalanceSampler, ParameterError, plan_batches
from gpusampler import planner as planners
from gpusampler.on_device import DevicePlans

HERE = torch.device("cpu")
FIELDS = [field.name for field in dataclasses.fields(BatchPlan) if not field.name.startswith("_")]


def root(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.double().sqrt()


def tiny(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.double() * 2.0**-1030


def huge(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.double() * 2.0**1000


def falling(lengths: torch.Tensor) -> torch.Tensor:
    return 1.0 / lengths.double()


def broken(lengths: torch.Tensor) -> torch.Tensor:
    return torch.where(lengths == lengths.amax(), torch.nan, lengths.double())


def assert_same(got: BatchPlan, expected: BatchPlan) -> None:
    for name in FIELDS:
        a, b = getattr(got, name), getattr(expected, name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        (skewed(24), {}),
        (skewed(24), {"sync": "step"}),
        (skewed(24), {"cost": CostModel(alpha=1e-3, intercept=1e4)}),
        (skewed(24), {"cost": CostModel(intercept=0.1), "sync": "step"}),
        (few(24), {"cost": CostModel(alpha=0.0), "max_tokens": 40}),
        (giant(24), {"cost": CostModel(cost_fn=root, intercept=3.0)}),
        (skewed(24), {"cost": CostModel(cost_fn=tiny)}),
        (skewed(24), {"cost": CostModel(cost_fn=huge), "sync": "step"}),
        (few(6), {}),
        (np.zeros((0, 9), np.int64), {}),
    ],
)
def test_both_engines_make_the_same_plan(lengths: np.ndarray, options: dict[str, Any]):
    rows = torch.from_numpy(lengths)
    assert_same(plan_batches(rows, 3, 2, engine="triton", **options).check(), plan_batches(rows, 3, 2, **options))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint32])
def test_any_integer_dtype_and_stride(dtype: torch.dtype):
    rows = torch.randint(1, 200, (30, 2), generator=torch.Generator().manual_seed(0)).to(dtype).T
    assert_same(plan_batches(rows, 3, engine="triton").check(), plan_batches(rows, 3))
    assert_same(plan_batches(rows.numpy(), 3, engine="triton"), plan_batches(rows, 3))


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ([5, 0, 3, 4], {}),
        ([5, 3, -7, 4], {}),
        ([5, 3, 2**31, 4], {}),
        ([5, 3, 9, 4], {"max_tokens": 8}),
        ([5, 3, 8, 7], {"max_tokens": 8}),
        ([2**28, 5, 3, 4], {}),
        ([2**31 - 1, 5, 3, 4], {"cost": CostModel(alpha=1e6)}),
        ([5, 3, 8, 7], {"cost": CostModel(cost_fn=falling)}),
        ([5, 3, 8, 7], {"cost": CostModel(cost_fn=broken)}),
        ([5, 0, 8, 7], {"cost": CostModel(cost_fn=falling)}),
    ],
)
def test_a_bad_row_raises_what_the_cpu_engine_raises(row: list[int], options: dict[str, Any]):
    rows = torch.tensor([[1, 1, 1, 1], row, [2, 2, 2, 2]])
    with pytest.raises(ParameterError) as expected:
        plan_batches(rows, 3, engine="cpu", **options)
    plan = plan_batches(rows, 3, engine="triton", **options)
    assert (plan.status != 0).tolist() == [False, True, False]
    with pytest.raises(ParameterError) as got:
        plan.check()
    assert str(got.value) == str(expected.value)
    assert sorted(plan.microbatch(0, 0, 0).tolist() + plan.order[0, plan.offsets[0, 1] :].tolist()) == [0, 1, 2, 3]
    with pytest.raises(ParameterError, match=r".*"):
        plan.microbatch(1, 0, 0)
    assert plan.order[1].tolist() == [-1] * 4
    assert plan.step_cost.isnan().tolist() == [False, True, False]


def test_what_the_kernels_cannot_do_is_an_error_when_asked_for():
    with pytest.raises(
        ParameterError, match=r"engine='triton' cannot plan on cpu: dp_size \* grad_accum = 3000 is above"
    ):
        plan_batches(torch.ones(1, 3000, dtype=torch.int64), 3000, engine="triton")


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers plan by the kernels on CPU tensors: the lines that a GPU runs, on `torch.cpu`'s streams and events."""
    monkeypatch.setattr(planners, "choose_device", lambda *_: HERE)


SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in order": {"shuffle": False},
    "a tail": {"drop_last": False},
    "a tail that is filled up": {"drop_last": False, "effective_batch_size": 9, "dp_size": 3, "grad_accum": 2},
    "per step": {"sync": "step", "cost": CostModel(intercept=100.0)},
    "a function": {"cost": CostModel(cost_fn=root)},
    "a cap": {"max_tokens": 9000, "grad_accum": 2},
    "oversize": {"max_tokens": 1500, "oversize": "alone", "cost": CostModel(alpha=0.0), "dp_size": 4},
}


def sampler(**options: Any) -> GPUBatchRebalanceSampler:
    arguments = {"effective_batch_size": 8, "dp_size": 2, "plan_ahead": 2, "rank": 1, **options}
    return GPUBatchRebalanceSampler(np.minimum(skewed(29, rows=1)[0], 2000), **arguments)


@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.filterwarnings("ignore:.*samples are longer than max_tokens")
def test_an_epoch_is_that_of_the_cpu_engine(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    expected = []
    for epoch in range(2):
        plain = sampler(device="cpu", **options)
        plain.set_epoch(epoch)
        expected.append(list(plain))
    monkeypatch.setattr(planners, "choose_device", lambda *_: HERE)
    planned = sampler(**options)
    for epoch in range(2):
        planned.set_epoch(epoch)
        assert list(planned) == expected[epoch]
    assert planned._planner._plans is not None
    assert all(type(index) is int for batch in expected[0] for index in batch)


def test_the_cpu_engine_plans_the_first_step_alone(on_device: None, monkeypatch: pytest.MonkeyPatch):
    planned = []
    plan = GPUBatchRebalanceSampler._plan_chunk
    monkeypatch.setattr(
        GPUBatchRebalanceSampler,
        "_plan_chunk",
        lambda *place, **named: planned.append(place[1:]) or plan(*place, **named),
    )
    epochs = sampler()
    assert [len(list(epochs)) for _ in range(2)] == [3, 3]
    assert planned == [(0, 0, 1)]


def test_a_device_that_plans_otherwise_is_left(on_device: None, monkeypatch: pytest.MonkeyPatch):
    reference = list(sampler(device="cpu"))
    begin = DevicePlans.begin
    monkeypatch.setattr(DevicePlans, "begin", lambda self, epoch, step, *rest: begin(self, epoch + 1, step, *rest))
    with pytest.warns(RuntimeWarning, match="cpu plans step 0 otherwise than the CPU does, which is a bug"):
        assert list(sampler()) == reference
    asked_for = sampler()
    asked_for._planner.device = torch.device("cuda")
    with pytest.raises(RuntimeError, match="plans step 0 otherwise"):
        list(asked_for)


def test_workers_and_resume(on_device: None):
    reference = list(sampler())
    first = sampler()
    taken = []
    for batch in DataLoader(range(29), batch_sampler=first, num_workers=2, collate_fn=list):
        taken.append(batch)
        if len(taken) == 2:
            state = first.state_dict()
            break
    rest = sampler()
    rest.load_state_dict(state)
    assert taken + list(rest) == reference


def test_a_cap_that_a_step_breaks_names_the_step(on_device: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GPUBatchRebalanceSampler, "_check_cap", lambda self, epoch: None)
    tight = sampler(max_tokens=2000)
    with pytest.raises(
        ParameterError, match=r"max_tokens=2000 cannot be met in step \d of epoch 0: it needs at least 3"
    ):
        list(tight)


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("no kernel image\nis available")


def test_a_device_that_fails_is_left_with_one_warning(on_device: None, monkeypatch: pytest.MonkeyPatch):
    reference = list(sampler(device="cpu"))
    monkeypatch.setattr(DevicePlans, "begin", fail)
    planned = sampler()
    with pytest.warns(
        RuntimeWarning, match="on the CPU instead of the GPU: RuntimeError: 'no kernel image'$"
    ) as caught:
        assert list(planned) == reference
    assert len(caught) == 1
    assert len(list(planned)) == len(reference)


def test_a_device_that_was_asked_for_and_fails_raises(on_device: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DevicePlans, "begin", fail)
    planned = sampler()
    planned._planner.device = torch.device("cuda")
    with pytest.raises(RuntimeError, match="no kernel image"):
        list(planned)


def test_a_copy_leaves_the_device_behind(on_device: None):
    planned = sampler()
    batches = list(planned)
    state = planned.__getstate__()["_planner"].__getstate__()
    assert state["_plans"] is None
    planned.close()
    assert planned._planner._plans is None
    assert list(planned) == batches
