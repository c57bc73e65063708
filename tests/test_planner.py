"""Where plans are made: the engine and the device asked for, and what there is."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from gpusampler import CostModel, GPUBatchRebalanceSampler, NotAvailableError, ParameterError, plan_batches
from gpusampler import planner as planners
from gpusampler.plan_kernels import warn_once

ROWS = torch.tensor([[8, 1, 2, 7, 1, 1]])
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


def sampler(**options: Any) -> GPUBatchRebalanceSampler:
    return GPUBatchRebalanceSampler(range(1, 41), 8, 2, rank=0, **options)


@no_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_cuda_where_there_is_none_is_refused(device: Any):
    with pytest.raises(ParameterError, match=r"^device='cuda(:1)?', but torch finds no CUDA device"):
        sampler(device=device)


def test_other_devices_are_refused():
    with pytest.raises(NotAvailableError, match="device must be on 'cpu' or 'cuda', plans cannot be made on 'meta'"):
        sampler(device="meta")
    for device in ("gpu", [0]):
        with pytest.raises(ParameterError, match=r"device must be a torch device, got .*(gpu|0)"):
            sampler(device=device)


def test_engines():
    plan = plan_batches(ROWS, 2, engine="cpu")
    assert torch.equal(plan.order, plan_batches(ROWS, 2).order)
    assert plan.check() is plan
    with pytest.raises(ParameterError, match="engine must be one of 'cpu', 'triton', got 'cuda'"):
        plan_batches(ROWS, 2, engine="cuda")
    with pytest.raises(ParameterError, match=r"engine='triton' cannot plan on cpu: .*only under TRITON_INTERPRET=1"):
        plan_batches(ROWS, 2, engine="triton")


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of a GPU that is too old."""
    warn_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))


def test_L54_an_unsupported_gpu_is_left_with_one_warning(old_gpu: None):
    with pytest.warns(
        RuntimeWarning, match="on the CPU instead of the GPU: compute capability 7.5 is below 8.0"
    ) as seen:
        batches = [list(sampler()) for _ in range(2)]
    assert len(seen) == 1
    assert batches == [list(sampler(device="cpu"))] * 2


def test_L54_an_unsupported_gpu_that_was_asked_for_raises(old_gpu: None):
    planned = sampler(device="cuda:0")
    with pytest.raises(ParameterError, match=r"device='cuda:0' cannot plan: compute capability 7.5 is below 8.0"):
        list(planned)
    with pytest.raises(ParameterError, match="device='cuda:1', but there are 1 CUDA devices"):
        sampler(device="cuda:1")


def test_what_does_not_fit_the_kernels_goes_to_the_cpu(old_gpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    long = GPUBatchRebalanceSampler([1, 2**23, 5, 6], 4, rank=0, cost=CostModel(cost_fn=torch.Tensor.double))
    with pytest.warns(RuntimeWarning, match=r"cost_fn over lengths from 1 to 8388608 is a table of more than 4194304"):
        assert len(list(long)) == 1
    wide = GPUBatchRebalanceSampler([1] * 4000, 4000, 3000, rank=0)
    with pytest.warns(RuntimeWarning, match=r"dp_size \* grad_accum = 3000 is above 2048"):
        assert len(list(wide)) == 1


def test_L56_a_worker_does_not_look_for_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for CUDA"))
    plain = sampler()
    assert planners.choose_device(None, plain.partition, plain.lengths) is None


def test_L56_a_process_in_which_cuda_cannot_start_plans_on_the_cpu(old_gpu: None, monkeypatch: pytest.MonkeyPatch):
    def forked() -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.\nUse spawn")

    monkeypatch.setattr(torch.cuda, "current_device", forked)
    with pytest.warns(RuntimeWarning, match=r"Cannot re-initialize CUDA in forked subprocess\.$"):
        assert len(list(sampler())) == 5


def test_L56_making_and_copying_a_sampler_leaves_cuda_alone():
    code = """
import pickle, torch
from gpusampler import GPUBatchRebalanceSampler
sampler = pickle.loads(pickle.dumps(GPUBatchRebalanceSampler(range(1, 41), 8, 2, rank=0)))
sampler.report(); sampler.plan(0); sampler.state_dict()
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


PLANS_WITHOUT_TRITON = """
import sys, warnings
import torch
if {hide}:
    sys.modules["triton"] = None
from gpusampler import GPUBatchRebalanceSampler, ParameterError, plan_batches
plan = plan_batches(torch.tensor([[8, 1, 2, 7, 1, 1]]), 2)
print(plan.order.tolist())
try:
    plan_batches(torch.tensor([[8, 1, 2, 7, 1, 1]]), 2, engine="triton")
except ParameterError as error:
    print(error)
sampler = GPUBatchRebalanceSampler(range(1, 41), 8, 2, rank=0)
print(list(sampler))
torch.cuda.is_available, torch.cuda.current_device, torch.cuda.device_count = lambda: True, lambda: 0, lambda: 1
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for epoch in range(2):
        print(list(sampler))
print([str(each.message) for each in seen])
try:
    list(GPUBatchRebalanceSampler(range(1, 41), 8, 2, rank=0, device="cuda"))
except ParameterError as error:
    print(error)
"""


@pytest.mark.parametrize("broken", [False, True])
def test_L54_no_triton_or_a_broken_one(broken: bool, tmp_path: Path):
    if broken:
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "__init__.py").write_text("raise RuntimeError('0 active drivers')\n")
    command = [sys.executable, "-c", PLANS_WITHOUT_TRITON.format(hide=not broken)]
    shown = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    reason = "triton cannot be imported ("
    reason += "RuntimeError: 0 active drivers" if broken else "ModuleNotFoundError: import of triton halted"
    expected = str(list(sampler(device="cpu")))
    assert shown[0] == str(plan_batches(ROWS, 2).order.tolist())
    assert shown[1].startswith(f"engine='triton' cannot plan on cpu: {reason}")
    assert shown[2:5] == [expected] * 3
    assert shown[5].count("planning on the CPU instead of the GPU") == 1
    assert reason in shown[5]
    assert shown[6].startswith(f"device='cuda' cannot plan: {reason}")


def test_threads_plan_where_the_device_is_the_cpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = list(DataLoader(range(40), batch_sampler=sampler(device="cpu"), num_workers=1, collate_fn=list))
    assert batches == list(sampler())
