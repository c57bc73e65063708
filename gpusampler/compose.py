"""Which samples share an optimizer step: the shuffled order of an epoch, cut into global batches.

The order is a keyed bijection of the samples (`kernels.spec.shuffle`): any step's samples are computed alone, from
(seed, epoch), in O(B) time and memory, without a global random generator, the same on every rank. Nothing here
depends on ranks, slots or costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpusampler.kernels import spec

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Composition:
    """The global batches of every epoch.

    Attributes:
        num_samples: N.
        batch_size: B, samples in a full step.
        groups: K; a tail below K is filled up to K with repeats from the start of the epoch's order.
        shuffle: shuffle each epoch, else the order of the dataset.
        seed: of the shuffle.
        drop_last: drop the tail of fewer than B samples.
    """

    num_samples: int
    batch_size: int
    groups: int
    shuffle: bool
    seed: int
    drop_last: bool

    @property
    def full_steps(self) -> int:
        """Steps of B samples."""
        return self.num_samples // self.batch_size

    @property
    def tail(self) -> int:
        """Samples of the last, smaller step; 0 if there is none."""
        return 0 if self.drop_last else self.num_samples % self.batch_size

    @property
    def steps(self) -> int:
        """Optimizer steps an epoch, the same in each."""
        return self.full_steps + (1 if self.tail else 0)

    @property
    def repeats(self) -> int:
        """Samples repeated in the last step, to give every group one."""
        return max(0, self.groups - self.tail) if self.tail else 0

    def size(self, step: int) -> int:
        """Samples in a step, repeats included."""
        return self.batch_size if step < self.full_steps else self.tail + self.repeats

    def indices(self, epoch: int, step: int, count: int = 1) -> Indices:
        """Samples of `count` steps of one size.

        Args:
            epoch: epoch, >= 0.
            step: first step.
            count: full steps, or 1 if `step` is the tail.

        Returns:
            int64 [count, size(step)], dataset indices in shuffled order.
        """
        size = self.size(step)
        out = np.empty((count, size), dtype=np.int64)
        start = step * self.batch_size
        if step < self.full_steps:
            self.fill(epoch, start, out.reshape(-1))
            return out
        self.fill(epoch, start, out[0, : self.tail])
        filled = self.tail
        while filled < size:
            more = min(size - filled, self.num_samples)
            self.fill(epoch, 0, out[0, filled : filled + more])
            filled += more
        return out

    def fill(self, epoch: int, start: int, out: Indices) -> None:
        """Write the samples at places `start`, `start + 1`, ... of an epoch's order to `out`."""
        if self.shuffle:
            spec.shuffle(start, spec.round_keys(self.seed, epoch), self.num_samples, out)
        else:
            out[:] = np.arange(start, start + len(out))
