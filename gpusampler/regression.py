"""Robust least squares with coefficients that cannot be negative, for timings and memory peaks.

Measured quantities here are sums of a few positive parts (so much a micro-batch, a token, a squared token), measured
with an error in proportion to their size, some of them wrong altogether: the first steps compile, a step waits for a
disk. The fit minimises the squared relative errors `1 - predicted / measured` of the records that agree with the
rest. Outliers are found from a least-absolute-error fit by the median of its errors, and named, not hidden. O(n) a
pass for n records of up to three coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

# Relative errors that are never outliers: they may be how the machine is, and few records cannot tell.
_KEPT_OF_FEW, _FEW, _KEPT_OF_MANY = 0.25, 30, 0.10
_OUTLIER_SPREADS = 6.0
_PASSES = 50


@dataclass(frozen=True, eq=False)
class LinearFit:
    """A fit of `measured ~ design @ coefficients`.

    Attributes:
        coefficients: float64 [p], >= 0.
        covariance: of the coefficients without their bound, float64 [p, p].
        sigma: standard deviation of the relative errors of kept records.
        errors: `1 - predicted / measured` of every record, float64 [n].
        kept: records that are not outliers, bool [n].
        condition: of the design with columns of one norm; above 1e4 the coefficients cannot be told apart.
    """

    coefficients: Floats
    covariance: Floats
    sigma: float
    errors: Floats
    kept: np.ndarray[Any, np.dtype[np.bool_]]
    condition: float

    @property
    def freedom(self) -> int:
        """Kept records above the number of coefficients."""
        return int(self.kept.sum()) - len(self.coefficients)

    def quantile(self, confidence: float = 0.95) -> float:
        """Standard errors on either side of an estimate that hold its true value with this confidence."""
        return t_quantile(0.5 + confidence / 2, self.freedom)


def robust_fit(design: Floats, measured: Floats) -> LinearFit:
    """Fit non-negative coefficients, leaving out outliers.

    Args:
        design: float64 [n, p], n > p, 1 <= p <= 3, columns >= 0 and not all zero.
        measured: float64 [n], > 0.

    Returns:
        The fit; its covariance counts on independent errors of kept records.

    Example:
        >>> tokens = np.array([100.0, 200.0, 300.0, 400.0, 500.0, 600.0])
        >>> seconds = 1.0 + tokens / 100
        >>> seconds[3] = 90.0
        >>> fit = robust_fit(np.stack([np.ones(6), tokens], axis=1), seconds)
        >>> fit.coefficients.round(6).tolist(), np.flatnonzero(~fit.kept).tolist()
        ([1.0, 0.01], [3])
    """
    relative = design / measured[:, None]
    norms = np.sqrt(np.square(relative).sum(axis=0))
    scaled = relative / norms
    kept = _inliers(scaled)
    inside = scaled[kept]
    solution = nonnegative_least_squares(inside, np.ones(len(inside)))
    errors = 1.0 - scaled @ solution
    freedom = max(1, len(inside) - design.shape[1])
    sigma = float(np.sqrt(np.square(errors[kept]).sum() / freedom))
    singular = np.linalg.svd(inside, compute_uv=False)
    condition = float(singular[0] / singular[-1]) if singular[-1] > 0 else float("inf")
    covariance = sigma**2 * np.linalg.pinv(inside.T @ inside, rcond=1e-12, hermitian=True) / np.outer(norms, norms)
    return LinearFit(solution / norms, covariance, sigma, errors, kept, condition)


def nonnegative_least_squares(design: Floats, target: Floats) -> Floats:
    """Minimise `|design @ x - target|` over `x >= 0`, exactly, by trying every set of columns that are not at zero.

    Example:
        >>> nonnegative_least_squares(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 1.0])).round(6).tolist()
        [1.5, 0.0]
    """
    columns = design.shape[1]
    # the triangle has the same solutions, of every set of columns, and few rows
    triangle = np.asarray(np.linalg.qr(np.column_stack([design, target]), mode="r"))
    design, target = triangle[:, :-1], triangle[:, -1]
    best, least = np.zeros(columns), float(target @ target)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            part = np.linalg.lstsq(design[:, chosen], target, rcond=None)[0]
            if (part < 0).any():
                continue
            rest = design[:, chosen] @ part - target
            if float(rest @ rest) < least:
                best, least = np.zeros(columns), float(rest @ rest)
                best[list(chosen)] = part
    return best


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution, by the expansion of Abramowitz and Stegun, 26.7.5.

    Exact for 1 and 2 degrees of freedom, and to 1 % for more up to a probability of 0.999.

    Example:
        >>> [round(t_quantile(0.975, freedom), 2) for freedom in (1, 2, 5, 30)]
        [12.71, 4.3, 2.57, 2.04]
    """
    if freedom <= 1:
        return float(np.tan(np.pi * (probability - 0.5)))
    if freedom == 2:
        return float((2 * probability - 1) / np.sqrt(2 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(z + sum(term / freedom**power for power, term in enumerate(terms, start=1)))


def _inliers(scaled: Floats) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Records whose error in a least-absolute-error fit is like that of the rest."""
    count, columns = scaled.shape
    sizes = np.ones(count)
    for _ in range(_PASSES):
        root = 1.0 / np.sqrt(np.maximum(sizes, 1e-6))
        before = sizes
        sizes = np.abs(1.0 - scaled @ nonnegative_least_squares(scaled * root[:, None], root))
        if np.abs(sizes - before).max() < 1e-6:
            break
    # the fit passes through as many records as it has coefficients: their errors say nothing of the spread
    spread = 1.4826 * float(np.median(np.sort(sizes)[columns:]))
    always = _KEPT_OF_FEW if count < _FEW else _KEPT_OF_MANY
    return sizes <= max(always, _OUTLIER_SPREADS * spread)
