"""Which entry a step draws: independent draws, or an even sequence, both functions of (seed, step) alone.

`IndependentDraws` mixes the seed and the step into 64 bits and compares them with integer thresholds: O(log k) a draw
at any step, no state. The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014, "Fast splittable
pseudorandom number generators").

`LowDiscrepancyDraws` keeps, after every step s, each entry's count strictly within one of s times its probability. It
is the quota method of apportionment (Balinski and Young, 1975; Tijdeman's chairman assignment, 1980): visit j of an
entry of probability p may happen in steps [floor((j - 1) / p), ceil(j / p)), and the open visit with the earliest end
goes first. The windows that lie inside any b - a steps number at most sum(floor(b p) - ceil(a p)) <= b - a, so
earliest-end-first meets them all. No closed form is known for more than two entries: a step costs O(k) from the one
before it; marks are kept every 4096 steps and the sequence repeats after the sum of the integer weights. `counts` and
`resume` make a restart O(1).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from gpusampler.errors import ParameterError, check_choice, check_int
from gpusampler.tasks.exact import integer_weights

DRAWS = ("iid", "low_discrepancy")
_MASK = (1 << 64) - 1
_MARK_EVERY = 4096


def mix(*words: int) -> int:
    """64 well-mixed bits from any number of integers; the order of the words matters.

    Example:
        >>> mix(0), mix(0, 1) == mix(1, 0)
        (16294208416658607535, False)
    """
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def name_key(name: str) -> int:
    """A 64-bit key of a name, the same in every process (the builtin `hash` is not)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class Draws(Protocol):
    """Entry drawn at each step."""

    def at(self, step: int) -> int:
        """Index of the entry drawn at `step`."""

    def counts(self, step: int) -> list[int] | None:
        """Draws of each entry before `step` if the sequence needs them to go on in O(1), else None."""

    def resume(self, step: int, counts: Sequence[int] | None) -> None:
        """Take up the sequence at `step`, where `counts` said what it said."""


class IndependentDraws:
    """Independent draws with given probabilities.

    Args:
        probabilities: Exact, summing to 1; an entry of probability 0 is never drawn.
        key: Seed of the sequence.

    Example:
        >>> draws = IndependentDraws([Fraction(1, 4), Fraction(0), Fraction(3, 4)], key=7)
        >>> [draws.at(step) for step in range(12)]
        [2, 0, 2, 2, 0, 2, 2, 2, 0, 2, 2, 0]
    """

    def __init__(self, probabilities: Sequence[Fraction], key: int) -> None:
        weights, total = integer_weights(probabilities)
        self._key = key
        self._ends: list[int] = []
        seen = 0
        for weight in weights:
            seen += weight
            self._ends.append((seen << 64) // total)

    def at(self, step: int) -> int:
        """Index of the entry drawn at `step`."""
        return bisect_right(self._ends, mix(self._key, step))

    def counts(self, step: int) -> None:
        """None: a draw needs nothing but its step."""

    def resume(self, step: int, counts: Sequence[int] | None) -> None:
        """Nothing to do: a draw needs nothing but its step."""


class LowDiscrepancyDraws:
    """The even sequence: every count stays strictly within one of its expectation.

    Args:
        probabilities: Exact, summing to 1; an entry of probability 0 is never drawn.
        key: Seed; it orders entries whose visits end at the same step.

    Example:
        >>> draws = LowDiscrepancyDraws([Fraction(1, 4), Fraction(0), Fraction(3, 4)], key=7)
        >>> [draws.at(step) for step in range(8)]
        [2, 2, 0, 2, 2, 2, 0, 2]
    """

    def __init__(self, probabilities: Sequence[Fraction], key: int) -> None:
        self._weights, self._period = integer_weights(probabilities)
        self._order = sorted(
            (entry for entry, weight in enumerate(self._weights) if weight), key=lambda entry: mix(key, entry)
        )
        self._marks = [0]
        self._counts_at = {0: [0] * len(self._weights)}
        self._step = 0
        self._counts = [0] * len(self._weights)
        self._last = (-1, -1)

    def at(self, step: int) -> int:
        """Index of the entry drawn at `step`."""
        if self._last[0] != step:
            self._go_to(step % self._period)
            self._last = step, self._advance()
        return self._last[1]

    def counts(self, step: int) -> list[int]:
        """Draws of each entry before `step`."""
        periods, local = divmod(step, self._period)
        if self._last[0] == step and self._step == local + 1:  # a step that is under way: drawn, and not behind
            counts = list(self._counts)
            counts[self._last[1]] -= 1
            return [periods * weight + count for weight, count in zip(self._weights, counts, strict=True)]
        self._go_to(local)
        return [periods * weight + count for weight, count in zip(self._weights, self._counts, strict=True)]

    def resume(self, step: int, counts: Sequence[int] | None) -> None:
        """Take up the sequence at `step`, where `counts` said what it said.

        Raises:
            ParameterError: The counts cannot have come from this sequence.
        """
        periods, local = divmod(step, self._period)
        given = list(counts or [])
        found = [count - periods * weight for count, weight in zip(given, self._weights, strict=False)]
        near = all(
            abs(count * self._period - local * weight) < self._period
            for count, weight in zip(found, self._weights, strict=False)
        )
        if not near or len(given) != len(self._weights) or sum(found) != local:
            raise ParameterError(f"draw_counts {given} are not counts of this sequence at step {step}")
        self._mark(local, found)

    def _mark(self, step: int, counts: list[int]) -> None:
        if step not in self._counts_at:
            insort(self._marks, step)
            self._counts_at[step] = list(counts)

    def _go_to(self, step: int) -> None:
        mark = self._marks[bisect_right(self._marks, step) - 1]
        if not mark <= self._step <= step:
            self._step, self._counts = mark, list(self._counts_at[mark])
        while self._step < step:
            self._advance()

    def _advance(self) -> int:
        chosen, first_end = -1, 0
        for entry in self._order:
            weight, count = self._weights[entry], self._counts[entry]
            if count * self._period < (self._step + 1) * weight:
                end = -((count + 1) * self._period // -weight)
                if chosen < 0 or end < first_end:
                    chosen, first_end = entry, end
        self._counts[chosen] += 1
        self._step += 1
        if self._step % _MARK_EVERY == 0:
            self._mark(self._step, self._counts)
        return chosen


def make_draws(kind: str, probabilities: Sequence[Fraction], key: int) -> Draws:
    """`IndependentDraws` for "iid", `LowDiscrepancyDraws` for "low_discrepancy"."""
    check_choice("draw", kind, DRAWS)
    return IndependentDraws(probabilities, key) if kind == "iid" else LowDiscrepancyDraws(probabilities, key)


def check_step(step: int) -> int:
    """A step as a builtin int."""
    return check_int("step", step, minimum=0)
