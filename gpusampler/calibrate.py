"""The cost model of a machine and a network, from measured times of micro-batches.

A micro-batch of n samples padded to L tokens takes `t0 + b * n * L + c * n * L**2` seconds; in units of a token's time
that is a `CostModel` of `intercept = t0 / b` and `alpha = c / b`. The fit is least squares on relative errors with
outliers left out (`regression`), so that the first steps, which compile, and steps that waited for something else need
not be removed by hand. Time and memory O(n) for n records.

The uncertainty counts errors of records as independent; what the model cannot express (a kernel that is slow at one
length) is in it only as far as it shows as scatter. Times of ranks that wait for each other are those of the slowest,
see `recorder`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpusampler.cost import CostModel
from gpusampler.errors import ParameterError, check_bool
from gpusampler.records import check_records
from gpusampler.regression import Floats, LinearFit, robust_fit, t_quantile
from gpusampler.tables import as_table

CANNOT_BE_TOLD = 1e4  # condition of the scaled design above which t0 and b trade off freely
_LEAST_SPAN = 1.5  # longest over shortest length
_MOST_QUADRATIC = 1e3  # alpha times the shortest length: the linear part is then 0.1 % of the time at most
_LEAST_GROWTH = 1e-6  # share of the largest record's time; of rounding it is less
_NO_FIT = 0.5  # relative error of a fit that says nothing
_MOST_ROWS = 24
_MEASURE = "time a few steps of at least 4 shapes: few and many samples, at lengths from short to the longest you train"


@dataclass(frozen=True)
class Estimate:
    """A fitted number.

    Attributes:
        value: best estimate, >= 0.
        error: its standard error.
        low: lower end of the 95 % interval, >= 0.
        high: upper end.
    """

    value: float
    error: float
    low: float
    high: float

    def __str__(self) -> str:
        """Value with its interval."""
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True, eq=False)
class Calibration:
    """A fitted cost model and how far to trust it.

    Attributes:
        model: ready to plan with.
        alpha: in 1 / tokens.
        intercept: of a micro-batch, in tokens.
        seconds_per_token: b.
        seconds_per_token2: c, a squared token of a sample.
        seconds_per_microbatch: t0.
        sigma: standard deviation of the relative errors `1 - fitted / measured` of kept records.
        records: float64 [n, 3] of samples, padded length, seconds.
        errors: relative error of each record, float64 [n].
        kept: False for outliers, bool [n].
        notes: what could not be told from these records, a sentence each.

    Example:
        >>> shapes = [(n, length) for n in (1, 4, 16) for length in (128, 512, 2048)]
        >>> found = fit_cost([(n, L, 1e-5 * (300 + n * (L + 1e-4 * L * L))) for n, L in shapes])
        >>> f"{found.model.alpha:.3g} {found.model.intercept:.3g}"
        '0.0001 300'
    """

    model: CostModel
    alpha: Estimate
    intercept: Estimate
    seconds_per_token: Estimate
    seconds_per_token2: Estimate
    seconds_per_microbatch: Estimate
    sigma: float
    records: Floats
    errors: Floats
    kept: np.ndarray[Any, np.dtype[np.bool_]]
    notes: tuple[str, ...]

    def seconds(self, samples: Any, length: Any) -> Any:
        """Time of a micro-batch of `samples` padded to `length` tokens; numbers or arrays."""
        tokens = self.seconds_per_token.value + self.seconds_per_token2.value * length
        return self.seconds_per_microbatch.value + samples * length * tokens

    def length_error(self, length: float) -> float:
        """Relative standard error of the cost of one sample of this length, against that of a short one."""
        return self.alpha.error * length / (1.0 + self.alpha.value * length)

    def table(self) -> str:
        """What was fitted, what it rests on, and measured beside fitted times by shape."""
        lines = [
            f"alpha      {self.alpha} 1/tokens",
            f"intercept  {self.intercept} tokens a micro-batch",
            f"seconds    {self.seconds_per_microbatch.value:.4g} + n L ({self.seconds_per_token.value:.4g} + "
            f"{self.seconds_per_token2.value:.4g} L)",
            f"records    {len(self.records)}, {int((~self.kept).sum())} left out, relative error {self.sigma:.2%} "
            "(standard deviation); intervals hold 95 %",
            *(f"note       {note}" for note in self.notes),
        ]
        return "\n".join(
            [*lines, "", as_table(("samples", "length", "records", "seconds", "fitted", "error"), self._rows())]
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the records, as builtin values."""
        names = ("alpha", "intercept", "seconds_per_token", "seconds_per_token2", "seconds_per_microbatch")
        return {
            **{name: vars(getattr(self, name)) for name in names},
            "sigma": self.sigma,
            "records": len(self.records),
            "outliers": np.flatnonzero(~self.kept).tolist(),
            "notes": list(self.notes),
        }

    def _rows(self) -> list[list[str]]:
        shapes, place = np.unique(self.records[:, 1::-1], axis=0, return_inverse=True)
        place = place.reshape(-1)
        rows = []
        for i in np.unique(np.linspace(0, len(shapes) - 1, _MOST_ROWS).astype(int)):
            length, samples = shapes[i]
            measured = float(np.median(self.records[place == i, 2]))
            fitted = float(self.seconds(samples, length))
            shape = (f"{samples:.0f}", f"{length:.0f}", str(int((place == i).sum())))
            rows.append([*shape, f"{measured:.4g}", f"{fitted:.4g}", f"{1 - fitted / measured:+.1%}"])
        return rows


def fit_cost(records: Any, *, intercept: bool | None = None) -> Calibration:
    """Fit a cost model to measured times.

    Args:
        records: array or tensor [n, 3], or an iterable of n triples (samples, padded length, seconds) of a
            micro-batch's forward and backward; n >= 4, at least 3 distinct shapes and 2 lengths, the longest 1.5 times
            the shortest or more.
        intercept: True: fit a cost a micro-batch; False: take it as 0. None: fit it where the records tell it from 0
            with 95 % confidence, else take it as 0; the uncertainty of `alpha` is that of a fit with it, if the records
            can tell the two apart.

    Returns:
        The model with its uncertainty.

    Raises:
        ParameterError: a record that is not a shape and a time, too few distinct shapes (it says what to measure), or
            times that do not grow with the tokens.
    """
    if intercept is not None:
        check_bool("intercept", intercept)
    table = check_records(records, ("samples", "length", "seconds"), whole=2)
    samples, length, seconds = table.T
    _check_shapes(samples, length)
    tokens = samples * length
    full = robust_fit(np.stack([np.ones_like(tokens), tokens, tokens * length], axis=1), seconds)
    told = full.condition < CANNOT_BE_TOLD and full.freedom > 0 and bool(full.coefficients[1:].any())
    least = t_quantile(0.975, full.freedom) * float(np.sqrt(full.covariance[0, 0]))
    notes = []
    wanted = intercept
    if intercept is None:
        intercept = told and float(full.coefficients[0]) > least
        if not told:
            notes.append(
                "the intercept cannot be told from the cost of a token and is taken as 0: all records have about the "
                "same samples * length"
            )
        elif not intercept:
            notes.append("the intercept is not told from 0 and taken as 0")
    elif intercept and not told:
        raise ParameterError(
            f"records do not tell the intercept from the cost of a token: {_MEASURE}, or intercept=False"
        )
    fit = full if intercept else robust_fit(np.stack([tokens, tokens * length], axis=1), seconds)
    wide = full if wanted is not False and told else fit
    return _calibration(table, fit, wide, told or wanted is False, notes)


def _check_shapes(samples: Floats, length: Floats) -> None:
    shapes = Counter(zip(samples.astype(int).tolist(), length.astype(int).tolist(), strict=True))
    if len(shapes) < 3 or len(samples) < 4:
        some = ", ".join(f"{n} x {tokens}" for n, tokens in list(shapes)[:3])
        raise ParameterError(
            "records must have at least 3 distinct shapes (samples x length) in at least 4 records, got "
            f"{len(samples)} records of {len(shapes)} ({some}): {_MEASURE}"
        )
    shortest, longest = int(length.min()), int(length.max())
    if longest < _LEAST_SPAN * shortest:
        raise ParameterError(
            f"records must have lengths at least {_LEAST_SPAN} times apart to tell alpha, got {shortest} to {longest}: "
            f"{_MEASURE}"
        )


def _calibration(table: Floats, fit: LinearFit, wide: LinearFit, intercept_told: bool, notes: list[str]) -> Calibration:
    """Turn coefficients into token units; intervals are those of `wide`, widened to hold the values of `fit`."""
    shortest = float(table[:, 1].min())
    start, linear, quadratic = _coefficients(fit, shortest)
    if fit.sigma > _NO_FIT:
        raise ParameterError(
            "records must have times that grow with samples * length, of one model on one machine, most of them "
            f"undisturbed; the best fit is off by {fit.sigma:.0%}: {_MEASURE}"
        )
    _check_growth(table, fit)
    if linear <= quadratic * shortest / _MOST_QUADRATIC:
        notes.append("the cost of a token is not told from 0: time grows with the squared length alone")
    around = _coefficients(wide, shortest)
    covariance = np.zeros((3, 3))
    covariance[-len(wide.coefficients) :, -len(wide.coefficients) :] = wide.covariance
    # least squares on relative errors is low by up to twice the variance of the errors
    biased = covariance + (2 * wide.sigma**2) ** 2 * np.outer(around, around)

    def estimate(value: float, center: float, gradient: Sequence[float], errors: Floats) -> Estimate:
        error = float(np.sqrt(np.array(gradient) @ errors @ np.array(gradient)))
        reach = wide.quantile() * error
        return Estimate(value, error, max(0.0, min(value, center - reach)), max(value, center + reach))

    ratio, extra = around[2] / around[1], around[0] / around[1]
    alpha = estimate(quadratic / linear, ratio, (0.0, -ratio / around[1], 1.0 / around[1]), covariance)
    intercept = estimate(start / linear, extra, (1.0 / around[1], -extra / around[1], 0.0), covariance)
    if not intercept_told:
        most = float(table[:, 2].min()) / linear
        intercept = Estimate(0.0, most, 0.0, most)
    if alpha.low == 0.0:
        notes.append("alpha is not told from 0: time longer samples")
    outliers = np.flatnonzero(~fit.kept).tolist()
    if outliers:
        notes.append(f"left out as outliers: records {str(outliers[:8])[1:-1]}{', ...' if len(outliers) > 8 else ''}")
    units = np.eye(3).tolist()
    return Calibration(
        model=CostModel(alpha=alpha.value, intercept=intercept.value),
        alpha=alpha,
        intercept=intercept,
        seconds_per_token=estimate(linear, around[1], units[1], biased),
        seconds_per_token2=estimate(quadratic, around[2], units[2], biased),
        seconds_per_microbatch=estimate(start, around[0], units[0], biased),
        sigma=fit.sigma,
        records=table,
        errors=fit.errors,
        kept=fit.kept,
        notes=tuple(notes),
    )


def _check_growth(table: Floats, fit: LinearFit) -> None:
    """Refuse times that are those of empty micro-batches, as far as they can be told from noise."""
    samples, length, seconds = table.T
    parts = np.stack([samples * length, samples * length**2], axis=1) / seconds[:, None]
    shares = parts @ fit.coefficients[-2:]
    most = int(shares.argmax())
    error = float(np.sqrt(parts[most] @ fit.covariance[-2:, -2:] @ parts[most]))
    if shares[most] < max(_LEAST_GROWTH, fit.quantile() * error):
        raise ParameterError(
            f"records must have times that grow with samples * length: {shares[most]:.2%} of a time is all that does, "
            f"give or take {error:.2%}: {_MEASURE}"
        )


def _coefficients(fit: LinearFit, shortest: float) -> tuple[float, float, float]:
    """Seconds a micro-batch, token and squared token; the second high enough for the ratio of the third to exist."""
    start = float(fit.coefficients[0]) if len(fit.coefficients) == 3 else 0.0
    linear, quadratic = (float(value) for value in fit.coefficients[-2:])
    return start, max(linear, quadratic * shortest / _MOST_QUADRATIC), quadratic
