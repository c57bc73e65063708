"""Loss weights: exact values, and the gradient that they stand for."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpusampler import microbatch_weight
from gpusampler.errors import ParameterError


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((5, 10), 0.5),
        ((0, 7), 0.0),
        ((7, 7), 1.0),
        ((5, 10, 4), 2.0),
        ((5, 10, 4, 3), 6.0),
        ((1, 3, 1, 3), 1.0),
        ((2**62, 2**62, 1024), 1024.0),
    ],
)
def test_values(arguments: tuple[int, ...], expected: float):
    weight = microbatch_weight(*arguments)
    assert type(weight) is float
    assert weight == expected


def test_names_of_the_arguments():
    assert microbatch_weight(num_items=3, num_items_in_batch=6, dp_size=2, grad_accum=5) == 5.0


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(-50, 50)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 4]),
    st.booleans(),
)
def test_the_step_sees_the_mean_over_all_items(parts: list[tuple[int, int]], dp_size: int, divides: bool):
    parts = parts * dp_size  # parts[slot * dp_size + rank]
    slots = len(parts) // dp_size
    total = sum(n for n, _ in parts)
    if not total:
        return
    weights = [microbatch_weight(n, total, dp_size, slots if divides else 1) for n, _ in parts]
    averaged = sum(weight * loss for weight, (_, loss) in zip(weights, parts, strict=True)) / dp_size
    step = averaged / slots if divides else averaged
    assert step == pytest.approx(float(Fraction(sum(n * loss for n, loss in parts), total)), abs=1e-9)
    assert sum(weights) == pytest.approx(dp_size * (slots if divides else 1))


def test_tensors_stay_tensors():
    weight = microbatch_weight(torch.tensor(3), torch.tensor(12), dp_size=2)
    assert isinstance(weight, torch.Tensor)
    assert weight.item() == 0.5
    assert microbatch_weight(torch.tensor([1, 3]), 4, grad_accum=2).tolist() == [0.5, 1.5]
    assert microbatch_weight(3, torch.tensor(12)).item() == 0.25
    loss = torch.ones(1, requires_grad=True)
    (loss * microbatch_weight(torch.tensor(1), torch.tensor(4))).backward()
    assert loss.grad is not None
    assert loss.grad.item() == 0.25


@pytest.mark.parametrize(
    ("dtype", "arguments", "expected"),
    [
        (torch.int32, (65536, 2**27, 1024, 32), 16.0),
        (torch.int8, (100, 120, 2), 100 * 2 / 120),
        (torch.uint8, (200, 250, 4), 3.2),
        (torch.int64, (2**62, 2**62, 1024), 1024.0),
    ],
)
@pytest.mark.parametrize("both", [False, True])
def test_L23_small_integer_types_do_not_wrap(
    dtype: torch.dtype, arguments: tuple[int, ...], expected: float, both: bool
):
    items, total, *sizes = arguments
    weight = microbatch_weight(
        torch.tensor(items, dtype=dtype), torch.tensor(total, dtype=dtype) if both else total, *sizes
    )
    assert isinstance(weight, torch.Tensor)
    assert weight.dtype == torch.float32
    assert weight.item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 5), "num_items must be at least 0, got -1"),
        ((6, 5), "num_items must be at most num_items_in_batch = 5, got 6"),
        ((0, 0), "num_items_in_batch must be at least 1, got 0"),
        ((1.5, 5), "num_items must be an int, got 1.5"),
        ((True, 5), "num_items must be an int, got True"),
        ((1, 5, 0), "dp_size must be at least 1, got 0"),
        ((1, 5, 2.0), "dp_size must be an int, got 2.0"),
        ((1, 5, 1, -1), "grad_accum must be at least 1, got -1"),
        ((torch.tensor(1), 5, 0), "dp_size must be at least 1, got 0"),
        ((torch.tensor(0), torch.tensor(0)), r"num_items_in_batch must be at least 1, got tensor\(0\)"),
        ((torch.tensor(1), 0), "num_items_in_batch must be at least 1, got 0"),
        ((torch.tensor([3, -1]), 5), r"num_items must be at least 0, got tensor\(\[ 3, -1\]\)"),
        ((torch.tensor([3, 6]), 5), r"at most num_items_in_batch = 5, got tensor\(\[3, 6\]\)"),
        ((torch.tensor(1.0), 5), "num_items must be an int or an integer tensor, got a tensor of torch.float32"),
        ((1, torch.tensor(True)), "num_items_in_batch must be an int or an integer tensor, got a tensor of torch.bool"),
    ],
)
def test_bad_counts_are_named(arguments: tuple[Any, ...], message: str):
    with pytest.raises(ParameterError, match=message):
        microbatch_weight(*arguments)


def test_tensors_on_a_device_are_not_waited_for():
    # a meta tensor has no values: whatever looked at one would raise
    weight = microbatch_weight(torch.zeros(3, dtype=torch.int32, device="meta"), 5, dp_size=2)
    assert isinstance(weight, torch.Tensor)
    assert (weight.device.type, weight.dtype, weight.shape) == ("meta", torch.float32, (3,))


@pytest.mark.gpu
def test_cuda_tensors_without_a_synchronisation():
    items, total = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in (65536, 2**27))
    torch.cuda.set_sync_debug_mode("error")
    try:
        weight = microbatch_weight(items, total, dp_size=1024, grad_accum=32)
        mixed = microbatch_weight(items, 2**27, dp_size=1024, grad_accum=32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(weight, torch.Tensor)
    assert weight.item() == 16.0
    assert mixed.device.type == "cuda"
    assert mixed.item() == 16.0
