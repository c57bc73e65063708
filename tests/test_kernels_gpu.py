"""The planner on a real GPU: the specification's plans, no synchronisation, CUDA graphs, large offsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpusampler.kernels import spec

pytest.importorskip("triton")
from gpusampler.kernels import engine
from gpusampler.kernels.checks import MAX_LENGTH
from gpusampler.kernels.shuffle import shuffle_places
from gpusampler.kernels.sort import sort_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ALPHAS = np.array([round(1e-4 * 2.0**shift) for shift in range(spec.MAX_SHIFT + 1)], np.int64)


def skewed(rows: int, size: int) -> np.ndarray:
    return np.maximum(1, np.random.default_rng(size).lognormal(6, 1.0, (rows, size)).astype(np.int64))


def by_spec(lengths: np.ndarray, dp_size: int, slots: int, max_tokens: int, per_step: bool) -> tuple[np.ndarray, ...]:
    rows, size = lengths.shape
    outputs = (
        np.zeros((rows, size), np.int32),
        np.zeros((rows, dp_size * slots + 1), np.int32),
        np.zeros((rows, slots, dp_size)),
        np.zeros((rows, slots, dp_size), np.int64),
        np.zeros((rows, 2)),
        np.zeros(rows, np.int64),
    )
    none = np.empty((0, 0))
    spec.plan_rows(lengths, none, ALPHAS, dp_size, slots, max_tokens, per_step, *outputs)
    return outputs


def plan(lengths: torch.Tensor, dp_size: int, slots: int, max_tokens: int, per_step: bool) -> engine.Plan:
    table = torch.from_numpy(ALPHAS).cuda()
    return engine.plan_rows(lengths, None, table, dp_size, slots, max_tokens, per_step)


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize(
    ("size", "dp_size", "slots"),
    [(1, 1, 1), (63, 7, 1), (256, 8, 4), (1024, 64, 1), (1024, 16, 4), (4096, 64, 4), (9000, 16, 2), (20000, 64, 1)],
)
def test_the_plan_of_the_specification(size: int, dp_size: int, slots: int, per_step: bool):
    lengths = skewed(3, size)
    for max_tokens in (0, int(lengths.max() * max(1, size // (dp_size * slots)))):
        expected = by_spec(lengths, dp_size, slots, max_tokens, per_step)
        got = plan(torch.from_numpy(lengths).cuda(), dp_size, slots, max_tokens, per_step)
        planned = expected[-1] == spec.OK
        for name, tensor, array in zip(got._fields, got, expected, strict=True):
            rows = slice(None) if name == "status" else planned
            np.testing.assert_array_equal(tensor.cpu().numpy()[rows], array[rows], err_msg=name)


def test_no_synchronisation():
    lengths = torch.from_numpy(skewed(2, 512)).cuda()
    plan(lengths, 8, 2, 0, False)
    table = torch.from_numpy(ALPHAS).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        planned = engine.plan_rows(lengths, None, table, 8, 2, 0, False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(tensor.is_cuda for tensor in planned)


def test_a_captured_plan_follows_its_input():
    lengths = torch.from_numpy(skewed(2, 512)).cuda()
    table = torch.from_numpy(ALPHAS).cuda()
    arguments = (None, table, 8, 2, 0, False)
    engine.plan_rows(lengths, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = engine.plan_rows(lengths, *arguments)
    lengths.copy_(torch.from_numpy(skewed(2, 512)[:, ::-1].copy()))
    graph.replay()
    for got, expected in zip(captured, engine.plan_rows(lengths, *arguments), strict=True):
        assert torch.equal(got, expected)


def test_a_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    lengths = torch.from_numpy(skewed(1, 100))
    table = torch.from_numpy(ALPHAS)
    plans = [
        engine.plan_rows(lengths.to(device), None, table.to(device), 4, 2, 0, False) for device in ("cuda:0", "cuda:1")
    ]
    for first, second in zip(*plans, strict=True):
        assert torch.equal(first.cpu(), second.cpu())


def test_offsets_beyond_2_to_31():
    size = 8192
    rows = 2**31 // size + 2
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of free device memory")
    lengths = torch.ones((rows, size), dtype=torch.int32, device="cuda")
    last = torch.from_numpy(skewed(1, size)[0]).to(torch.int32)
    lengths[-1] = last
    order = sort_rows(lengths, MAX_LENGTH, 232448)[-1].cpu()
    expected = np.empty(size, np.int64)
    spec.sort_row(last.numpy().astype(np.int64), expected)
    assert order.tolist() == expected.tolist()


def test_the_shuffle_of_the_specification():
    keys = spec.round_keys(42, 7)
    for start, count, size in ((0, 1000, 1000), (2**33, 5000, 2**34 + 1)):
        expected = np.empty(count, np.int64)
        spec.shuffle(start, keys, size, expected)
        assert shuffle_places(start, count, keys, size, "cuda").cpu().tolist() == expected.tolist()
