"""Inputs at the edges that were handled wrongly once: huge and tiny numbers, odd arrays, configs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from gpusampler import CostModel, GPUBatchRebalanceSampler, feasible, plan_batches
from gpusampler.errors import ParameterError
from gpusampler.pipeline import PlanAhead


@pytest.mark.parametrize("cost", [1e20, 1e40, 1e100])
def test_large_custom_costs(cost):
    rows = torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1]])
    plan = plan_batches(rows, 2, cost=CostModel(cost_fn=lambda n: n.double() * cost))
    unit = plan_batches(rows, 2, cost=CostModel(cost_fn=lambda n: n.double()))
    assert torch.equal(plan.offsets, unit.offsets)
    torch.testing.assert_close(plan.step_cost, unit.step_cost * cost, rtol=1e-6, atol=0)


@pytest.mark.parametrize("power", [-20, -40, -60, -100])
def test_small_custom_costs(power):
    rows = torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1]])
    plan = plan_batches(rows, 2, 2, cost=CostModel(cost_fn=lambda n: n.double() * 2.0**power))
    unit = plan_batches(rows, 2, 2, cost=CostModel(cost_fn=lambda n: n.double()))
    assert torch.equal(plan.offsets, unit.offsets)


def test_intercept_swamps_custom_costs():
    rows = torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1]])
    plan = plan_batches(rows, 2, cost=CostModel(cost_fn=lambda n: n.double(), intercept=1e20))
    assert plan.offsets.tolist() == [[0, 3, 12]] or plan.offsets.tolist() == [[0, 8, 12]]


def test_in_place_cost_function():
    rows = torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1]])
    before = rows.clone()
    plan_batches(rows, 2, cost=CostModel(cost_fn=lambda n: n.mul_(2)))
    assert torch.equal(rows, before)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_error_ends_the_iteration(depth):
    def plan(step, size):
        if step == 2:
            raise ValueError("boom")
        return step

    chunks = PlanAhead(iter([(i, 1) for i in range(6)]), plan, depth=depth)
    assert [next(chunks), next(chunks)] == [0, 1]
    with pytest.raises(ValueError, match="boom"):
        next(chunks)
    with pytest.raises(StopIteration):
        next(chunks)


def test_huge_values():
    rows = torch.tensor([[9, 8, 7, 6]])
    assert plan_batches(rows, 2, max_tokens=2**63).tokens.max() == plan_batches(rows, 2).tokens.max()


def test_huge_values_sampler():
    assert len(list(GPUBatchRebalanceSampler(range(1, 33), 4, max_tokens=2**63))) == 8


def test_huge_batch():
    with pytest.raises(ParameterError, match="effective_batch_size"):
        GPUBatchRebalanceSampler(range(1, 33), 2**70, drop_last=False)


@pytest.mark.parametrize("alpha", [1e-11, 1e-12, 1e-300])
def test_tiny_alpha(alpha):
    rows = torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1]])
    assert torch.equal(
        plan_batches(rows, 2, cost=CostModel(alpha=alpha)).offsets,
        plan_batches(rows, 2, cost=CostModel(alpha=0.0)).offsets,
    )


def test_default_heads_of_any_width():
    narrow = CostModel.for_transformer(hidden_size=1000, num_layers=1)
    assert narrow == CostModel.for_transformer(hidden_size=1000, num_layers=1, num_heads=10)


@pytest.mark.parametrize("rows", [np.arange(1, 13)[None, ::-1], np.arange(1, 13).astype(">i4")[None]])
def test_numpy_views(rows):
    assert torch.equal(plan_batches(rows, 2).offsets, plan_batches(torch.tensor(rows.tolist()), 2).offsets)


def test_read_only_numpy():
    rows = np.frombuffer(np.arange(1, 13).tobytes(), np.int64)[None]
    assert torch.equal(plan_batches(rows, 2).order, plan_batches(torch.arange(1, 13)[None], 2).order)


def test_late_cap_error_names_the_step(monkeypatch):
    monkeypatch.setattr(feasible, "CHECKED_SAMPLES", 8)
    sampler = GPUBatchRebalanceSampler([1] * 40 + [100] * 8 + [1] * 16, 8, 2, 2, shuffle=False, max_tokens=100, rank=0)
    with pytest.raises(ParameterError, match="step 5 of epoch 0"):
        list(sampler)


def test_encoders_are_not_causal():
    for config in (
        transformers.DistilBertConfig(),
        transformers.XLMRobertaConfig(),
        transformers.ModernBertConfig(),
        transformers.EsmConfig(),
        transformers.ViTConfig(),
    ):
        read = CostModel.from_config(config).alpha
        config.architectures = ["XForMaskedLM"]
        assert read == CostModel.from_config(config).alpha, type(config).__name__


def test_starcoder2_is_not_gated():
    c = transformers.Starcoder2Config(bos_token_id=0, eos_token_id=0)
    expected = CostModel.for_transformer(
        hidden_size=c.hidden_size,
        num_layers=c.num_hidden_layers,
        intermediate_size=c.intermediate_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
    )
    assert CostModel.from_config(c) == expected


def test_a_cost_function_that_is_not_elementwise_is_refused():
    with pytest.raises(ParameterError, match="cost_fn must give a length the same cost"):
        GPUBatchRebalanceSampler(range(1, 33), 4, cost=CostModel(cost_fn=lambda n: n / n.max()))
