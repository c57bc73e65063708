"""The specification on the inputs of the kernels, and inputs that are hard for both."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from gpusampler.kernels import engine, spec
from gpusampler.kernels.checks import MAX_LENGTH
from gpusampler.kernels.costs import Costs, scale_rows
from gpusampler.kernels.emit import Plan
from gpusampler.kernels.sort import sort_rows

SHARED_BYTES = 232448
SENTINEL = -7


class Case(NamedTuple):
    """Arguments of a plan."""

    lengths: np.ndarray
    dp_size: int
    slots: int
    max_tokens: int = 0
    per_step: bool = False
    custom: np.ndarray | None = None
    alpha: float = 1e-4


def alphas(alpha: float = 1e-4) -> np.ndarray:
    """The table of the cost model: alpha times 2**shift, rounded."""
    return np.array([round(alpha * 2.0**shift) for shift in range(spec.MAX_SHIFT + 1)], np.int64)


def skewed(size: int, rows: int = 2, seed: int = 0) -> np.ndarray:
    """Lognormal lengths with a heavy tail."""
    return np.maximum(1, np.random.default_rng(seed).lognormal(5, 1.4, (rows, size)).astype(np.int64))


def few(size: int, rows: int = 2, seed: int = 0) -> np.ndarray:
    """Lengths of few values: ties."""
    return np.random.default_rng(seed).integers(1, 4, (rows, size))


def giant(size: int, rows: int = 2) -> np.ndarray:
    """Ones and one long sample."""
    lengths = np.ones((rows, size), np.int64)
    lengths[:, size // 2] = 10**6
    return lengths


def prepare(lengths: np.ndarray, max_tokens: int = 0, alpha: float = 1e-4) -> Costs:
    """Rows as the search reads them."""
    rows = torch.from_numpy(lengths)
    status = torch.empty(len(rows), dtype=torch.int64)
    by_length = sort_rows(rows, MAX_LENGTH, SHARED_BYTES)
    return scale_rows(rows, None, torch.from_numpy(alphas(alpha)), max_tokens, MAX_LENGTH, by_length, status)


def plan_by_spec(case: Case) -> tuple[np.ndarray, ...]:
    """What the specification writes into poisoned outputs."""
    rows, size = case.lengths.shape
    groups = case.dp_size * case.slots
    outputs = (
        np.full((rows, size), SENTINEL, np.int32),
        np.full((rows, groups + 1), SENTINEL, np.int32),
        np.full((rows, case.slots, case.dp_size), SENTINEL, np.float64),
        np.full((rows, case.slots, case.dp_size), SENTINEL, np.int64),
        np.full((rows, 2), SENTINEL, np.float64),
        np.full(rows, SENTINEL, np.int64),
    )
    custom = np.empty((0, 0)) if case.custom is None else case.custom
    numbers: tuple[Any, ...] = (case.dp_size, case.slots, case.max_tokens, case.per_step)
    spec.plan_rows(case.lengths, custom, alphas(case.alpha), *numbers, *outputs)
    return outputs


def plan_by_kernels(case: Case) -> Plan:
    """What the kernels write."""
    return engine.plan_rows(
        torch.from_numpy(case.lengths),
        None if case.custom is None else torch.from_numpy(case.custom),
        torch.from_numpy(alphas(case.alpha)),
        case.dp_size,
        case.slots,
        case.max_tokens,
        case.per_step,
    )


def assert_same_plan(case: Case) -> Plan:
    """Both plans agree in shape, dtype and every bit, in what rows that do not fit hold too."""
    got = plan_by_kernels(case)
    for name, tensor, expected in zip(got._fields, got, plan_by_spec(case), strict=True):
        assert tensor.numpy().dtype == expected.dtype, name
        np.testing.assert_array_equal(tensor.numpy(), expected, err_msg=name)
    return got
