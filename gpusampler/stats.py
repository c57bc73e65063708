"""What planning ahead cost the training thread, counted where it happens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PlanStats:
    """Counts of one sampler on this rank, over all its iterations.

    Attributes:
        iterations: iterations begun; each waits for its first chunk, which cannot be planned ahead.
        steps: optimizer steps whose last micro-batch was handed out.
        chunks: chunks of steps received.
        waits: steps at which the training thread found the next chunk not ready, and waited.
        wait_seconds: the sum of these waits.
        max_wait_seconds: the longest of them.
        plan_seconds: time spent planning, mostly on the planning thread; 0 on ranks that receive plans.
        messages: broadcasts that this rank took part in.
        bytes_broadcast: their size.

    Example:
        >>> PlanStats(steps=200, waits=3).wait_share
        0.015
    """

    iterations: int = 0
    steps: int = 0
    chunks: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    max_wait_seconds: float = 0.0
    plan_seconds: float = 0.0
    messages: int = 0
    bytes_broadcast: int = 0

    @property
    def wait_share(self) -> float:
        """Share of the steps at which the training thread waited; 0 before the first step."""
        return self.waits / self.steps if self.steps else 0.0

    def add_wait(self, seconds: float) -> None:
        """Count one wait of the training thread."""
        self.waits += 1
        self.wait_seconds += seconds
        self.max_wait_seconds = max(self.max_wait_seconds, seconds)
