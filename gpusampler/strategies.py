"""Ways to cut an epoch into micro-batches, side by side: what the report and the demo compare.

- random: shuffled samples, in micro-batches of equal counts.
- length-grouped: megabatches of shuffled samples are sorted by length, then cut into equal counts (`group_by_length`).
- transformers: shuffled steps, split by the `BatchRebalanceSampler` of transformers >= 5.24 as it is shipped.
- transformers, alpha: the same, with the given `alpha` in place of its fixed cost constant.
- gpusampler: shuffled steps, split by `GPUBatchRebalanceSampler`.

All but length-grouped put the same samples into the same steps, so that their steps compare one by one. Every strategy
has two faces: `plan` gives all ranks' micro-batches of some steps, for evaluation; `batch_sampler` gives one rank's,
for a `DataLoader`. O(B) memory a step; the time of transformers' search grows with B * max(30 * K, B).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from gpusampler.compose import Composition, Indices
from gpusampler.errors import check_choice
from gpusampler.kernels.checks import gather
from gpusampler.sampler import GPUBatchRebalanceSampler

_MEGABATCHES = 50  # samples of a megabatch over those of a rank's step; transformers' default


class Rows(NamedTuple):
    """Micro-batches of W steps of one size: group `k = slot * D + rank` of row w is `samples[w, offsets[w, k:k+2]]`.

    Attributes:
        samples: int64 [W, B], dataset indices, group by group.
        offsets: int32 [W, K + 1].
    """

    samples: Indices
    offsets: np.ndarray[Any, np.dtype[np.int32]]


class Strategy:
    """One way to make micro-batches, with the settings of a sampler.

    Args:
        sampler: gives lengths, batch size, ranks, slots, seed and epoch.
    """

    name: ClassVar[str]
    own_steps: ClassVar[bool] = False
    """Whether a step holds other samples than the sampler's step."""

    def __init__(self, sampler: GPUBatchRebalanceSampler) -> None:
        """Keep the sampler; plans nothing."""
        self.sampler = sampler

    def plan(self, steps: Indices) -> Rows:
        """Micro-batches of all ranks in steps of the current epoch, which must have one size."""
        raise NotImplementedError

    def batch_sampler(self) -> Sampler[list[int]]:
        """This rank's micro-batches of the epoch, for a `DataLoader`."""
        return _RankBatches(self)

    def seconds_a_step(self) -> float:
        """Rough planning time of a step, where it is long enough to matter."""
        return 0.0


class Random(Strategy):
    """The shuffled order, cut into equal counts: a `RandomSampler` with a fixed batch size."""

    name = "random"

    def plan(self, steps: Indices) -> Rows:
        """See `Strategy.plan`."""
        samples = step_samples(self.sampler, steps)
        return Rows(samples, _equal_counts(samples.shape, self.sampler.partition.groups))


class LengthGrouped(Strategy):
    """Megabatches of the shuffled order, each sorted by length, cut into equal counts: `LengthGroupedSampler`.

    A megabatch holds 50 times the samples that a rank runs in a step, or a quarter of what there is, if that is less.
    Consecutive micro-batches go to consecutive ranks, as accelerate deals them. transformers also moves the longest
    sample of the epoch to its front; that is left out.
    """

    name = "length-grouped"
    own_steps = True

    def plan(self, steps: Indices) -> Rows:
        """See `Strategy.plan`."""
        sampler, composition = self.sampler, self.sampler.composition
        size = composition.size(int(steps[0]))
        # the repeats that fill a tail step start the order again
        places = (steps[:, None] * composition.batch_size + np.arange(size)) % composition.num_samples
        unit = composition.batch_size // sampler.dp_size
        megabatch = unit * max(1, min(composition.num_samples // (4 * unit), _MEGABATCHES))
        number = places // megabatch
        samples = np.empty_like(places)
        for one in np.unique(number):
            start = one * megabatch
            here = number == one
            samples[here] = self._sorted(start, min(start + megabatch, composition.num_samples))[places[here] - start]
        return Rows(samples, _equal_counts(samples.shape, sampler.partition.groups))

    def _sorted(self, start: int, stop: int) -> Indices:
        order = np.empty(stop - start, dtype=np.int64)
        self.sampler.composition.fill(self.sampler.epoch, start, order)
        return order[np.argsort(-gather(self.sampler.lengths.values, order), kind="stable")]


class Transformers(Strategy):
    """`BatchRebalanceSampler` of transformers, on the same steps.

    Its method `_assign` is called step by step: iterating it would plan every step once more for each rank.
    """

    name = "transformers"

    def __init__(self, sampler: GPUBatchRebalanceSampler) -> None:
        """Build the peer; it needs its lengths as a list, here it is given those of each step instead."""
        super().__init__(sampler)
        from transformers.trainer_pt_utils import BatchRebalanceSampler

        self.peer = BatchRebalanceSampler(
            [], sampler.effective_batch_size, sampler.dp_size, sampler.grad_accum, shuffle=False
        )

    def plan(self, steps: Indices) -> Rows:
        """See `Strategy.plan`."""
        samples = step_samples(self.sampler, steps)
        offsets = np.zeros((len(steps), self.sampler.partition.groups + 1), dtype=np.int32)
        for w, row in enumerate(samples):
            by_rank = self.peer._assign(row.tolist(), gather(self.sampler.lengths.values, row).tolist())
            groups = [rank[slot] for slot in range(self.sampler.grad_accum) for rank in by_rank]
            offsets[w, 1:] = np.cumsum([len(group) for group in groups])
            row[:] = [sample for group in groups for sample in group]
        return Rows(samples, offsets)

    def seconds_a_step(self) -> float:
        """Its search makes up to max(30 * K, B) moves of O(B) and stops at a tenth to a third of them as a rule."""
        size = self.sampler.effective_batch_size
        return 2.5e-8 * size * max(30 * self.sampler.partition.groups, size)


class TransformersAlpha(Transformers):
    """The same sampler, planning with the given `alpha` in place of its constant 0.001."""

    name = "transformers, alpha"

    def __init__(self, sampler: GPUBatchRebalanceSampler) -> None:
        """Replace the constant on this one object."""
        super().__init__(sampler)
        self.peer.QUADRATIC_COST_COEF = sampler.partition.cost.alpha


class Ours(Strategy):
    """`GPUBatchRebalanceSampler` itself."""

    name = "gpusampler"

    def plan(self, steps: Indices) -> Rows:
        """See `Strategy.plan`."""
        samples = step_samples(self.sampler, steps)
        plan = self.sampler.partition.plan(gather(self.sampler.lengths.values, samples))
        return Rows(np.take_along_axis(samples, plan.order.numpy(), axis=1), plan.offsets.numpy())

    def batch_sampler(self) -> Sampler[list[int]]:
        """Return the sampler."""
        return self.sampler


_STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind for kind in (Random, LengthGrouped, Transformers, TransformersAlpha, Ours)
}
STRATEGIES = tuple(_STRATEGIES)
"""Names that `make_strategy` takes, slowest training first as a rule."""


def make_strategy(name: str, sampler: GPUBatchRebalanceSampler) -> Strategy:
    """Build a strategy by its name, with the settings of a sampler.

    Raises:
        ParameterError: no such strategy.
    """
    return _kind(name)(sampler)


def unavailable(names: Collection[str]) -> dict[str, str]:
    """Say which of the strategies cannot be built here, and why.

    Raises:
        ParameterError: no such strategy.

    Example:
        >>> unavailable(["random", "gpusampler"])
        {}
    """
    needing = [name for name in names if issubclass(_kind(name), Transformers)]
    if not needing:
        return {}
    try:
        from transformers.trainer_pt_utils import BatchRebalanceSampler
    except ImportError:
        reason = "needs transformers >= 5.24: pip install 'gpusampler[demo]'"
    else:
        if hasattr(BatchRebalanceSampler, "_assign"):
            return {}
        reason = "the installed transformers has another BatchRebalanceSampler"
    return dict.fromkeys(needing, reason)


def _kind(name: str) -> type[Strategy]:
    return _STRATEGIES[check_choice("strategy", name, STRATEGIES)]


def step_samples(sampler: GPUBatchRebalanceSampler, steps: Indices) -> Indices:
    """Dataset indices of steps of the current epoch, int64 [W, B], in shuffled order."""
    composition: Composition = sampler.composition
    if int(steps[-1]) - int(steps[0]) == len(steps) - 1:
        return composition.indices(sampler.epoch, int(steps[0]), len(steps))
    return np.concatenate([composition.indices(sampler.epoch, int(step)) for step in steps])


def _equal_counts(shape: tuple[int, ...], groups: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Offsets of groups whose counts differ by one at most, larger ones first."""
    num_rows, size = shape
    counts = np.full(groups, size // groups)
    counts[: size % groups] += 1
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return np.tile(offsets, (num_rows, 1))


class _RankBatches(Sampler[list[int]]):
    """One rank's micro-batches of a strategy, planned step by step where they are asked for."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __len__(self) -> int:
        return len(self._strategy.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        sampler = self._strategy.sampler
        for step in range(sampler.composition.steps):
            samples, offsets = self._strategy.plan(np.array([step]))
            for group in range(sampler.rank, sampler.partition.groups, sampler.dp_size):
                yield samples[0, offsets[0, group] : offsets[0, group + 1]].tolist()

    def set_epoch(self, epoch: int) -> None:
        self._strategy.sampler.set_epoch(epoch)
