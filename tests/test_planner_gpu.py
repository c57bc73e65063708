"""`plan_batches` and the sampler on a real GPU: the CPU engine's plans, no synchronisation, CUDA graphs, workers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from gpusampler import BatchPlan, CostModel, GPUBatchRebalanceSampler, ParameterError, plan_batches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FIELDS = [field.name for field in dataclasses.fields(BatchPlan) if not field.name.startswith("_")]
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(6, 1.0, 5000).astype(np.int64) + 1, 20_000)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sync": "step"},
    {"cost": CostModel(alpha=1e-3, intercept=1e4)},
    {"cost": CostModel(cost_fn=torch.Tensor.double), "max_tokens": 200_000},
]


def assert_same(got: BatchPlan, expected: BatchPlan) -> None:
    for name in FIELDS:
        tensor = getattr(got, name)
        assert tensor.is_cuda
        np.testing.assert_array_equal(tensor.cpu().numpy(), getattr(expected, name).numpy(), err_msg=name)


@pytest.mark.parametrize("options", OPTIONS)
def test_both_engines_make_the_same_plan(options: dict[str, Any]):
    rows = torch.from_numpy(LENGTHS[:4096].reshape(8, 512))
    expected = plan_batches(rows, 8, 4, **options)
    assert_same(plan_batches(rows.cuda(), 8, 4, **options).check(), expected)
    assert_same(plan_batches(rows.cuda(), 8, 4, engine="cpu", **options), expected)


def test_nothing_waits_and_a_graph_follows_its_input():
    rows = torch.from_numpy(LENGTHS[:4096].reshape(8, 512)).cuda()
    cost = CostModel(intercept=5.0)
    plan_batches(rows, 8, 4, cost=cost)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan_batches(rows, 8, 4, cost=cost)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan_batches(rows, 8, 4, cost=cost)
    rows.copy_(rows.flip(1))
    graph.replay()
    assert_same(captured.check(), plan_batches(rows.cpu(), 8, 4, cost=cost))
    rows[3, 5] = 0
    graph.replay()
    with pytest.raises(ParameterError, match=r"got lengths\[3, 5\] = 0"):
        captured.check()


def test_bad_rows_are_told_by_their_status():
    rows = torch.tensor([[5, 3, 8, 7], [5, 3, 9, 7]], device="cuda")
    plan = plan_batches(rows, 2, max_tokens=8)
    assert plan.status[0].item() > 2
    assert plan.status[1].item() < 0
    with pytest.raises(ParameterError, match="max_tokens=8 cannot be met in row 0"):
        plan.check()
    with pytest.raises(ParameterError, match="row 0"):
        plan.microbatch(0, 0, 0)


@pytest.mark.parametrize("options", [*OPTIONS, {"shuffle": False, "drop_last": False}, {"dp_size": 1}])
@pytest.mark.parametrize("device", [None, "cuda", "cuda:0"])
def test_epochs_are_those_of_the_cpu_engine(options: dict[str, Any], device: str | None):
    arguments = {"dp_size": 4, "grad_accum": 2, "rank": 0, "plan_ahead": 3, **options}
    here, there = (GPUBatchRebalanceSampler(LENGTHS, 256, device=where, **arguments) for where in ("cpu", device))
    for epoch in range(2):
        here.set_epoch(epoch)
        there.set_epoch(epoch)
        assert list(there) == list(here)
    assert there._planner._plans is not None


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_L56_workers_have_no_cuda_context(method: str):
    planned = GPUBatchRebalanceSampler(LENGTHS, 256, 2, rank=0)
    list(planned)
    loader = DataLoader(
        _Contexts(), batch_sampler=planned, num_workers=2, multiprocessing_context=method, collate_fn=any
    )
    assert not any(loader)


class _Contexts(torch.utils.data.Dataset[bool]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> bool:
        return torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()


def test_nothing_waits_between_chunks():
    planned = GPUBatchRebalanceSampler(LENGTHS, 64, 2, rank=0, plan_ahead=16)
    batches = iter(planned)
    next(batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = [next(batches) for _ in range(7)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken == list(GPUBatchRebalanceSampler(LENGTHS, 64, 2, rank=0, device="cpu"))[1:8]


def test_a_training_step_can_be_captured_beside_it():
    x = torch.ones(1024, 1024, device="cuda")
    planned = GPUBatchRebalanceSampler(LENGTHS, 64, 2, rank=0, plan_ahead=16)
    batches = iter(planned)
    next(batches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x @ x
    rest = []
    for batch in batches:
        graph.replay()
        rest.append(batch)
    torch.cuda.synchronize()
    assert float(y[0, 0]) == 1024.0
    assert rest == list(GPUBatchRebalanceSampler(LENGTHS, 64, 2, rank=0, device="cpu"))[1:]
