"""Exact probabilities: shares, nominal epochs and integer thresholds, without a float in any decision.

A probability enters as the exact value of the float that was given (of a numpy float32 or float16, its shortest
decimal) and stays a `Fraction`, so that every rank, platform and library version finds the same epoch lengths and the
same draws. Rounding up allows one part in 10**12, so that `3 / 0.3` is 10 although 0.3 is not a binary fraction. All of
it is O(number of entries) in Python integers.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from gpusampler.errors import ParameterError, check_float

# Rounding of probabilities that were computed or typed in float64 (2**-53 each, a few of them) is far below this.
ROUNDING = Fraction(1, 10**12)
# The slack that deepmd-kit's users have for a list of probabilities that should sum to one.
SUM_SLACK = Fraction(1, 10**8)
# Steps and batches are at most this: reports show them as floats.
MAX_STEPS = 2**63 - 1
_LARGEST_FLOAT = Fraction(sys.float_info.max)


def exact_float(name: str, value: Any, minimum: float | None = None) -> Fraction:
    """A finite number as a `Fraction`; a float32 or float16 is the shortest decimal that rounds to it.

    Raises:
        ParameterError: It is no number, or out of range.

    Example:
        >>> exact_float("prob", np.float32(0.1)) == Fraction(0.1)
        True
    """
    number = check_float(name, value, minimum)
    if isinstance(value, numbers.Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    return Fraction(float(str(value)) if isinstance(value, (np.float32, np.float16)) else number)


def _shown(value: Fraction) -> float:
    return float(min(value, _LARGEST_FLOAT))


def round_up(value: Fraction) -> int:
    """The next integer at or above `value`; the one below it if `value` exceeds that by at most one part in 10**12.

    Example:
        >>> round_up(3 / Fraction(0.3)), round_up(Fraction(7, 2))
        (10, 4)
    """
    below = math.floor(value)
    return below if value - below <= value * ROUNDING else below + 1


def normalise(weights: Sequence[Fraction], what: str) -> tuple[Fraction, ...]:
    """Weights over their sum; `what` names them in the error.

    Raises:
        ParameterError: The sum is zero.
    """
    total = sum(weights, Fraction(0))
    if total <= 0:
        raise ParameterError(f"{what} must have a positive sum, got {[float(weight) for weight in weights]}")
    return tuple(weight / total for weight in weights)


def share_rest(given: Sequence[Fraction | None], sizes: Sequence[int], what: str) -> tuple[Fraction, ...]:
    """Probabilities of entries of which some (`None`) share, in proportion to `sizes`, what the others leave of 1.

    Args:
        given: Probability of each entry, or None.
        sizes: Batches of each entry.
        what: Name of the list in errors.

    Raises:
        ParameterError: Nothing, or more than everything, is given away; or nothing is there to take the rest.

    Example:
        >>> [str(p) for p in share_rest([Fraction(1, 2), None, None], [9, 1, 3], "prob")]
        ['1/2', '1/8', '3/8']
    """
    if None not in given:
        return normalise([p for p in given if p is not None], what)
    assigned = sum((p for p in given if p is not None), Fraction(0))
    open_size = sum(size for p, size in zip(given, sizes, strict=True) if p is None)
    rest = 1 - assigned
    if rest < -SUM_SLACK:
        raise ParameterError(f"{what} must sum to at most 1, got {_shown(assigned)}")
    if rest <= SUM_SLACK:
        rest = Fraction(0)
    if rest > 0 and open_size == 0:
        raise ParameterError(f"{what}: the entries that share the remaining {float(rest)} have no batches")
    if rest == 0 and open_size > 0:
        raise ParameterError(f"{what}: the given entries sum to {_shown(assigned)} and leave nothing for the others")
    shares = [p if p is not None else rest * size / max(open_size, 1) for p, size in zip(given, sizes, strict=True)]
    return normalise(shares, what)


def nominal_epoch(sizes: Sequence[int], probabilities: Sequence[Fraction], names: Sequence[str]) -> int:
    """Draws until each entry is expected to have been seen in full: `ceil(max(size / probability))`.

    Entries of probability zero count nothing.

    Args:
        sizes: Batches of each entry.
        probabilities: How often each is drawn.
        names: How errors call each entry.

    Raises:
        ParameterError: An entry is drawn and has no batches, or so rarely that no run could have an epoch.

    Example:
        >>> nominal_epoch([30, 10, 1000], [Fraction(3, 4), Fraction(1, 4), Fraction(0)], ["a", "b", "c"])
        40
    """
    longest = Fraction(0)
    for size, probability, name in zip(sizes, probabilities, names, strict=True):
        if probability > 0:
            if size == 0:
                raise ParameterError(f"{name} is drawn with probability {float(probability)} and has 0 batches")
            longest = max(longest, size / probability)
            if longest > MAX_STEPS:
                raise ParameterError(
                    f"{name} has {size} batches at probability {float(probability)}: a nominal epoch must be at most "
                    f"{MAX_STEPS} steps"
                )
    return round_up(longest)


def integer_weights(probabilities: Sequence[Fraction]) -> tuple[list[int], int]:
    """Coprime integers in the ratio of `probabilities`, and their sum.

    Example:
        >>> integer_weights([Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)])
        ([3, 2, 1], 6)
    """
    scale = math.lcm(*(p.denominator for p in probabilities))
    weights = [int(p * scale) for p in probabilities]
    divisor = math.gcd(*weights)
    weights = [weight // divisor for weight in weights]
    return weights, sum(weights)


def as_floats(probabilities: Sequence[Fraction]) -> list[float]:
    """The nearest float to each, for reading only."""
    return [float(p) for p in probabilities]
