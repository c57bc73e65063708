"""Planning rows of lengths: which samples of a global batch each rank runs in each accumulation slot.

`plan_batches` plans rows; `Partition` is everything a plan depends on besides them. The algorithm is `kernels.spec`:
integer costs, so that the same inputs give the same plan everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gpusampler.batch_plan import BatchPlan
from gpusampler.cost import CostModel, alpha_table
from gpusampler.errors import (
    NotAvailableError,
    ParameterError,
    ParameterTypeError,
    check_choice,
    check_int,
    quote,
)
from gpusampler.kernels import spec
from gpusampler.kernels.checks import MAX_LENGTH
from gpusampler.plan_kernels import check_engine, plan_on_device

LAYOUTS = ("padded", "packed")
SYNCS = ("microbatch", "step")
ENGINES = ("cpu", "triton")


@dataclass(frozen=True)
class Partition:
    """What a plan depends on besides the lengths of its row; checked once.

    Attributes:
        dp_size: ranks, D >= 1.
        grad_accum: slots, G >= 1.
        cost: the cost model.
        max_tokens: largest samples * longest of a micro-batch, or None.
        layout: "padded".
        sync: "microbatch" or "step": when ranks wait for each other.
    """

    dp_size: int
    grad_accum: int
    cost: CostModel = field(default_factory=CostModel)
    max_tokens: int | None = None
    layout: str = "padded"
    sync: str = "microbatch"

    def __post_init__(self) -> None:
        """Check every field."""
        set_field = object.__setattr__
        set_field(self, "dp_size", check_int("dp_size", self.dp_size, minimum=1, maximum=1 << 20))
        set_field(self, "grad_accum", check_int("grad_accum", self.grad_accum, minimum=1, maximum=1 << 14))
        if not isinstance(self.cost, CostModel):
            raise ParameterTypeError(f"cost must be a CostModel, got {quote(self.cost)}")
        if self.max_tokens is not None:
            set_field(self, "max_tokens", check_int("max_tokens", self.max_tokens, minimum=1))
        if check_choice("layout", self.layout, LAYOUTS) == "packed":
            raise NotAvailableError("layout='packed' is not available yet, use layout='padded'")
        check_choice("sync", self.sync, SYNCS)

    @property
    def groups(self) -> int:
        """Groups of a step, K."""
        return self.dp_size * self.grad_accum

    @property
    def cap(self) -> int:
        """`max_tokens` as the planner takes it, 0 for none."""
        return min(self.max_tokens or 0, 1 << 62)

    @property
    def longest_allowed(self) -> int:
        """Longest sample that does not exceed `max_tokens` on its own."""
        return min(MAX_LENGTH, self.max_tokens or MAX_LENGTH)

    @cached_property
    def _alphas(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return alpha_table(self.cost.alpha)

    def check_range(self, size: int, longest: int) -> None:
        """Refuse sizes whose summed integer cost would lose the weight of `alpha` or leave 62 bits.

        Raises:
            ParameterError: naming the size, the longest length and what to do.
        """
        if self.cost.cost_fn is not None:
            return
        shift = spec.shift_for_lengths(longest, size, self._alphas)
        if shift < 0 or (shift < spec.MAX_SHIFT and self.cost.alpha > 0 and self._alphas[shift] < spec.MIN_ALPHA_UNITS):
            raise ParameterError(
                f"lengths up to {longest} in batches of {size} with alpha {self.cost.alpha} exceed the integer "
                "range of the planner; measure lengths in a coarser unit, alpha in its inverse"
            )

    def plan(
        self, lengths: np.ndarray[Any, np.dtype[np.int64]], where: Callable[[int], str] = "row {}".format
    ) -> BatchPlan:
        """Plan the rows of `lengths`, int64 [W, B] of checked lengths with B >= K; `where` names a row in an error.

        The planner sees no intercept, which every group has, and costs of a function as parts of their row's largest:
        neither can take precision from the rest.

        Raises:
            ParameterError: a row needs more than K micro-batches under `max_tokens`; it names the row.
        """
        num_rows, size = lengths.shape
        shape = (num_rows, self.grad_accum, self.dp_size)
        order = np.empty((num_rows, size), dtype=np.int32)
        offsets = np.empty((num_rows, self.groups + 1), dtype=np.int32)
        costs = np.empty(shape, dtype=np.float64)
        tokens = np.empty(shape, dtype=np.int64)
        bounds = np.empty((num_rows, 2), dtype=np.float64)
        status = np.empty(num_rows, dtype=np.int64)
        custom, exponents = np.empty((0, 0)), np.zeros(num_rows, dtype=np.int32)
        if self.cost.cost_fn is not None:
            values = self.cost(torch.from_numpy(lengths)).numpy()
            exponents = np.frexp(values.max(axis=1, initial=0.0))[1]
            custom = np.ascontiguousarray(np.ldexp(values, -exponents[:, None]))
        spec.plan_rows(
            lengths,
            custom,
            self._alphas,
            self.dp_size,
            self.grad_accum,
            self.cap,
            self.sync == "step",
            order,
            offsets,
            costs,
            tokens,
            bounds,
            status,
        )
        self.raise_for(status, where)
        costs = np.ldexp(costs, exponents[:, None, None]) + self.cost.intercept
        bounds = np.ldexp(bounds, exponents[:, None]) + self.grad_accum * self.cost.intercept
        return BatchPlan(
            order=torch.from_numpy(order),
            offsets=torch.from_numpy(offsets),
            costs=torch.from_numpy(costs),
            tokens=torch.from_numpy(tokens),
            lower_bound=torch.from_numpy(bounds[:, 0].copy()),
            step_cost=torch.from_numpy(bounds[:, 1].copy()),
            status=torch.from_numpy(status),
        )

    def raise_for(self, status: np.ndarray[Any, np.dtype[np.int64]], where: Callable[[int], str]) -> None:
        """Raise for the first row of checked lengths that needs more groups than there are.

        Raises:
            ParameterError: naming `where` of that row.
        """
        if status.any():
            row = int(np.flatnonzero(status)[0])
            raise ParameterError(self.too_few_groups(int(status[row]), where(row)))

    def explain(self, lengths: torch.Tensor, row: int, status: int) -> None:
        """Raise what is wrong with a row of `lengths` [W, B], on the CPU, that has a status other than 0.

        Raises:
            ParameterError: always.
        """
        if status > 0:
            raise ParameterError(self.too_few_groups(status, f"row {row}"))
        _refuse_bad_lengths(lengths.numpy(), self)
        self.check_range(lengths.shape[1], int(lengths[row].max()))
        self.cost(lengths)
        raise ParameterError(
            f"cost_fn must return positive finite costs that do not decrease with the length, in row {row} it did not; "
            "on the CPU it does"
        )

    def too_few_groups(self, needed: int, where: str) -> str:
        """Message for a row that `max_tokens` splits into more micro-batches than there are."""
        return (
            f"max_tokens={self.max_tokens} cannot be met in {where}: it needs at least {needed} micro-batches, "
            f"dp_size * grad_accum is {self.groups}; set grad_accum to at least {-(-needed // self.dp_size)}, "
            "or raise max_tokens"
        )


def plan_batches(
    lengths: torch.Tensor,
    dp_size: int,
    grad_accum: int = 1,
    *,
    cost: CostModel | None = None,
    max_tokens: int | None = None,
    layout: str = "padded",
    sync: str = "microbatch",
    engine: str | None = None,
) -> BatchPlan:
    """Split global batches into micro-batches of equal cost.

    On a CUDA tensor the plan is made by Triton kernels, without waiting for the GPU: the call can be captured in a CUDA
    graph, after one with the same shapes and options has compiled the kernels. Rows that cannot be planned do not raise
    there, see `BatchPlan.check`. Both engines make the same plans, bit for bit.

    Args:
        lengths: integer tensor [W, B], one row a global batch, every length from 1 to 2^31 - 1.
        dp_size: data-parallel ranks, D.
        grad_accum: accumulation slots, G. B must be at least D * G.
        cost: cost of a sample at a padded length; default `CostModel()`. A `cost_fn` is called with a tensor on the
            device of `lengths`; where its results differ between devices, so may plans.
        max_tokens: largest samples * longest of any micro-batch; None for no cap.
        layout: "padded"; "packed" is not available yet.
        sync: "microbatch" if ranks wait for each other in every slot (FSDP, ZeRO-2/3, DDP without `no_sync`), "step"
            if only once a step (DDP with `no_sync`).
        engine: "cpu", "triton", or None: by the device of `lengths`, with a warning where it is a GPU on which the
            kernels cannot plan (more than 2048 groups or 256 slots, no Triton, compute capability below 8.0). "cpu"
            copies lengths from a GPU, which waits for it. "triton" on CPU tensors needs `TRITON_INTERPRET=1`.

    Returns:
        A plan on the device of `lengths`. The plan of a row depends on that row alone.

    Raises:
        ParameterError: a parameter out of range, an engine that cannot plan there, B < D * G; and from the CPU engine:
            a length below 1 or above `max_tokens`, or a row that needs more micro-batches; it names the index and
            the value.

    Example:
        >>> plan = plan_batches(torch.randint(1, 2048, (8, 256)), dp_size=8, grad_accum=4)
        >>> bool((plan.step_cost >= plan.lower_bound).all())
        True
    """
    partition = Partition(dp_size, grad_accum, CostModel() if cost is None else cost, max_tokens, layout, sync)
    if engine is not None:
        check_choice("engine", engine, ENGINES)
    rows = _check_rows(lengths, partition)
    if check_engine(engine, rows.device, partition) == "triton":
        return plan_on_device(partition, rows)
    array = rows.cpu().numpy()
    _refuse_bad_lengths(array, partition)
    if len(rows):
        partition.check_range(rows.shape[1], int(array.max()))
    return partition.plan(np.ascontiguousarray(array, dtype=np.int64)).to(rows.device)


def _check_rows(lengths: Any, partition: Partition) -> torch.Tensor:
    """Lengths as a dense integer tensor of enough columns, whatever the values."""
    if isinstance(lengths, np.ndarray) and lengths.dtype.kind in "iu":
        rows = torch.from_numpy(lengths.astype(lengths.dtype.newbyteorder("="), order="C"))
    elif isinstance(lengths, torch.Tensor):
        rows = lengths.detach()
    elif isinstance(lengths, np.ndarray):
        raise ParameterTypeError(f"lengths must have an integer dtype, got {lengths.dtype}")
    else:
        raise ParameterTypeError(f"lengths must be an integer tensor [W, B], got {quote(lengths)}")
    if rows.device.type == "meta":
        raise ParameterError("lengths must hold data, got a tensor on the meta device")
    if rows.layout != torch.strided:
        raise ParameterError(f"lengths must be a dense tensor, got layout {rows.layout}")
    if rows.ndim != 2:
        raise ParameterError(f"lengths must have shape [W, B], got {tuple(rows.shape)}; one batch is lengths[None]")
    if rows.is_floating_point() or rows.is_complex() or rows.is_quantized or rows.dtype == torch.bool:
        raise ParameterTypeError(f"lengths must have an integer dtype, got {lengths.dtype}")
    if rows.shape[1] < partition.groups:
        raise ParameterError(
            f"lengths must have at least dp_size * grad_accum = {partition.groups} columns, got {rows.shape[1]}"
        )
    return rows


def _refuse_bad_lengths(array: np.ndarray[Any, Any], partition: Partition) -> None:
    cap = partition.longest_allowed
    bad = (array < 1) | (array > cap)
    if bad.any():
        w, i = (int(x) for x in np.argwhere(bad)[0])
        limit = f"max_tokens {cap}" if cap == partition.max_tokens else str(cap)
        raise ParameterError(f"lengths must be from 1 to {limit}, got lengths[{w}, {i}] = {array[w, i]}")
