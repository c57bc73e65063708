"""A plan: which samples of a global batch each rank runs in each accumulation slot, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch

from gpusampler.errors import check_int

if TYPE_CHECKING:
    from gpusampler.plan import Partition


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
        status: int64 [W], 0. In a plan on a GPU other values mark rows that could not be planned: `check` tells why.
            Such a row has order -1, no samples in any group, and costs of nan.

    Example:
        >>> from gpusampler import CostModel, plan_batches
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
    status: torch.Tensor
    _made_of: tuple[Partition, torch.Tensor] | None = field(default=None, repr=False, compare=False)

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

    def to(self, device: str | torch.device) -> BatchPlan:
        """Return the plan on another device; itself if it is there."""
        if self.order.device == torch.device(device):
            return self
        moved = {each.name: getattr(self, each.name).to(device) for each in fields(self) if each.name[0] != "_"}
        return replace(self, **moved)

    def check(self) -> BatchPlan:
        """Return the plan if every row has been planned; on a GPU, wait for it first. On the CPU it always has been.

        Raises:
            ParameterError: a row could not be planned, for the reasons that `plan_batches` gives on the CPU.
        """
        bad = self.status.nonzero()
        if len(bad) and self._made_of is not None:
            partition, lengths = self._made_of
            partition.explain(lengths.cpu(), int(bad[0]), int(self.status[int(bad[0])]))
        return self

    def microbatch(self, w: int, slot: int, rank: int) -> torch.Tensor:
        """Positions within row `w` that `rank` runs in `slot`; waits for a GPU.

        Args:
            w: row, 0 to W - 1.
            slot: accumulation slot, 0 to G - 1.
            rank: data-parallel rank, 0 to D - 1.

        Returns:
            int32 tensor, at least one position, longest sample first.

        Raises:
            ParameterError: an index out of range, or a row that could not be planned.
        """
        w = check_int("w", w, minimum=0, maximum=len(self) - 1)
        slot = check_int("slot", slot, minimum=0, maximum=self.grad_accum - 1)
        rank = check_int("rank", rank, minimum=0, maximum=self.dp_size - 1)
        if self.status[w]:
            self.check()
        group = slot * self.dp_size + rank
        return self.order[w, int(self.offsets[w, group]) : int(self.offsets[w, group + 1])]
