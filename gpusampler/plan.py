"""Plans: which samples of a global batch each rank runs in each accumulation slot, and what that costs.

`plan_batches` plans rows of lengths; `Partition` is everything a plan depends on besides them. The algorithm is
`kernels.spec`: integer costs, so that the same inputs give the same plan everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

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

LAYOUTS = ("padded", "packed")
SYNCS = ("microbatch", "step")


@dataclass(frozen=True)
class BatchPlan:
    """Plans of W global batches of B samples for D ranks and G slots; K = D * G groups each.

    Attributes:
        order: int32 [W, B], positions within the row, group by group; longest first within a group.
        offsets: int32 [W, K + 1]; group `k = slot * D + rank` of row w is `order[w, offsets[w, k]:offsets[w, k + 1]]`.
        costs: float64 [W, G, D], cost of each micro-batch, in the unit of the cost model.
        tokens: int64 [W, G, D], samples times longest sample of each micro-batch.
        lower_bound: float64 [W], no plan has a smaller step cost, whatever its grouping.
        step_cost: float64 [W], sum over slots of the largest cost over ranks (`sync="microbatch"`), or largest over
            ranks of the sum over slots (`sync="step"`).

    Example:
        >>> plan = plan_batches(torch.tensor([[8, 1, 2, 7, 1, 1]]), dp_size=2, cost=CostModel(alpha=0.0))
        >>> plan.microbatch(0, slot=0, rank=0).tolist(), plan.microbatch(0, slot=0, rank=1).tolist()
        ([0, 3], [2, 1, 4, 5])
        >>> plan.costs.tolist()
        [[[16.0, 8.0]]]
    """

    order: torch.Tensor
    offsets: torch.Tensor
    costs: torch.Tensor
    tokens: torch.Tensor
    lower_bound: torch.Tensor
    step_cost: torch.Tensor

    @property
    def grad_accum(self) -> int:
        """Slots, G."""
        return self.costs.shape[1]

    @property
    def dp_size(self) -> int:
        """Ranks, D."""
        return self.costs.shape[2]

    def __len__(self) -> int:
        """Return the number of rows, W."""
        return self.order.shape[0]

    def microbatch(self, w: int, slot: int, rank: int) -> torch.Tensor:
        """Positions within row `w` that `rank` runs in `slot`.

        Args:
            w: row, 0 to W - 1.
            slot: accumulation slot, 0 to G - 1.
            rank: data-parallel rank, 0 to D - 1.

        Returns:
            int32 tensor, at least one position, longest sample first.

        Raises:
            ParameterError: an index out of range.
        """
        w = check_int("w", w, minimum=0, maximum=len(self) - 1)
        slot = check_int("slot", slot, minimum=0, maximum=self.grad_accum - 1)
        rank = check_int("rank", rank, minimum=0, maximum=self.dp_size - 1)
        group = slot * self.dp_size + rank
        return self.order[w, int(self.offsets[w, group]) : int(self.offsets[w, group + 1])]


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
        if shift < 0 or (shift < spec.MAX_SHIFT and self.cost.alpha > 0 and self._alphas[shift] < 16):
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
            min(self.max_tokens or 0, 1 << 62),
            self.sync == "step",
            order,
            offsets,
            costs,
            tokens,
            bounds,
            status,
        )
        if status.any():
            row = int(np.flatnonzero(status)[0])
            raise ParameterError(self.too_few_groups(int(status[row]), where(row)))
        costs = np.ldexp(costs, exponents[:, None, None]) + self.cost.intercept
        bounds = np.ldexp(bounds, exponents[:, None]) + self.grad_accum * self.cost.intercept
        made = map(torch.from_numpy, (order, offsets, costs, tokens, bounds[:, 0].copy(), bounds[:, 1].copy()))
        return BatchPlan(*made)

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
) -> BatchPlan:
    """Split global batches into micro-batches of equal cost.

    Args:
        lengths: integer tensor [W, B] on the CPU, one row a global batch, every length >= 1.
        dp_size: data-parallel ranks, D.
        grad_accum: accumulation slots, G. B must be at least D * G.
        cost: cost of a sample at a padded length; default `CostModel()`.
        max_tokens: largest samples * longest of any micro-batch; None for no cap.
        layout: "padded"; "packed" is not available yet.
        sync: "microbatch" if ranks wait for each other in every slot (FSDP, ZeRO-2/3, DDP without `no_sync`), "step"
            if only once a step (DDP with `no_sync`).

    Returns:
        A plan with CPU tensors. The plan of a row depends on that row alone.

    Raises:
        ParameterError: a parameter out of range, a length below 1, B < D * G, a length above `max_tokens`, or a row
            that needs more micro-batches; it names the index and the value.

    Example:
        >>> plan = plan_batches(torch.randint(1, 2048, (8, 256)), dp_size=8, grad_accum=4)
        >>> bool((plan.step_cost >= plan.lower_bound).all())
        True
    """
    partition = Partition(dp_size, grad_accum, CostModel() if cost is None else cost, max_tokens, layout, sync)
    rows = _check_rows(lengths, partition)
    if len(rows):
        partition.check_range(rows.shape[1], int(rows.max()))
    return partition.plan(rows)


def _check_rows(lengths: Any, partition: Partition) -> np.ndarray[Any, np.dtype[np.int64]]:
    if isinstance(lengths, torch.Tensor):
        if lengths.device.type != "cpu":
            raise NotAvailableError(f"lengths on {lengths.device} are not available yet, pass lengths.cpu()")
        if lengths.layout != torch.strided:
            raise ParameterError(f"lengths must be a dense tensor, got layout {lengths.layout}")
        array = lengths.detach().numpy() if lengths.dtype != torch.bfloat16 else lengths.detach().float().numpy()
    elif isinstance(lengths, np.ndarray):
        array = lengths
    else:
        raise ParameterTypeError(f"lengths must be an integer tensor [W, B], got {quote(lengths)}")
    if array.ndim != 2:
        raise ParameterError(f"lengths must have shape [W, B], got {array.shape}; one batch is lengths[None]")
    if array.dtype.kind not in "iu":
        raise ParameterTypeError(f"lengths must have an integer dtype, got {lengths.dtype}")
    if array.shape[1] < partition.groups:
        raise ParameterError(
            f"lengths must have at least dp_size * grad_accum = {partition.groups} columns, got {array.shape[1]}"
        )
    cap = min(MAX_LENGTH, partition.max_tokens or MAX_LENGTH)
    bad = (array < 1) | (array > cap)
    if bad.any():
        w, i = (int(x) for x in np.argwhere(bad)[0])
        limit = f"max_tokens {cap}" if cap == partition.max_tokens else str(cap)
        raise ParameterError(f"lengths must be from 1 to {limit}, got lengths[{w}, {i}] = {array[w, i]}")
    return np.ascontiguousarray(array, dtype=np.int64)
