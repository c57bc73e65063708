"""The largest `max_tokens` that fits a target of memory, from measured peaks of micro-batches.

The peak of a micro-batch of n samples padded to L tokens is `base + k * n * L` bytes, plus `q * n * L**2` where
attention is not fused; the records tell which. The cap is the largest number of padded tokens whose upper bound is
within the target: the bound is the fit plus what one more micro-batch may deviate with the chosen confidence, and never
below the worst record over its fit, outliers included: a peak that was seen once can be seen again. O(n) for n records.

What it cannot know: memory that other processes take later, and steps unlike the measured ones (another optimizer step,
an evaluation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpusampler.calibrate import CANNOT_BE_TOLD
from gpusampler.errors import ParameterError, ParameterTypeError, check_float, check_int, quote
from gpusampler.memory_report import GIB, MemoryReport
from gpusampler.records import check_records
from gpusampler.regression import Floats, LinearFit, robust_fit, t_quantile
from gpusampler.tables import as_table

SURE_REACH = 1.25  # how far beyond the largest measured micro-batch a cap is taken as sure
_MOST_BYTES = 1e18  # as for measured values, see `records`
_LEAST_SPAN = 1.5  # most over least tokens of the records
_MOST_ROWS = 16


@dataclass(frozen=True, eq=False)
class MemoryFit:
    """A cap on padded tokens and what it rests on.

    Attributes:
        max_tokens: the cap, for `GPUBatchRebalanceSampler(max_tokens=...)`.
        target_bytes: what a peak must not exceed.
        expected_bytes: peak that the fit expects at the cap.
        longest: length of the longest sample that the cap holds for; matters only if `bytes_per_token2` is not 0.
        base_bytes: peak of an empty micro-batch: weights, gradients, optimizer state.
        bytes_per_token: k.
        bytes_per_token2: q, a squared token of a sample.
        sigma: standard deviation of the relative errors.
        confidence: of one micro-batch at the cap to stay within the target.
        records: float64 [n, 3] of samples, length, bytes; length 1 where only tokens were given.
        notes: what to know before relying on the cap, a sentence each.

    Example:
        >>> found = fit_memory([(tokens, 2e9 + 1e6 * tokens) for tokens in (1000, 2000, 4000, 8000)], target_bytes=10e9)
        >>> found.max_tokens
        8000
    """

    max_tokens: int
    target_bytes: int
    expected_bytes: int
    longest: int
    base_bytes: float
    bytes_per_token: float
    bytes_per_token2: float
    sigma: float
    confidence: float
    records: Floats
    notes: tuple[str, ...]

    @property
    def margin_bytes(self) -> int:
        """Target minus the peak expected at the cap."""
        return self.target_bytes - self.expected_bytes

    def expected(self, tokens: Any, length: Any) -> Any:
        """Peak expected of micro-batches of `tokens` padded tokens, the samples padded to `length`; bytes."""
        return self.base_bytes + tokens * (self.bytes_per_token + self.bytes_per_token2 * length)

    def table(self) -> str:
        """The cap, the fit, and measured beside expected peaks."""
        slope = f"{self.bytes_per_token:.6g} bytes a token"
        if self.bytes_per_token2:
            slope += f" + {self.bytes_per_token2:.6g} bytes a token times length, up to length {self.longest}"
        lines = [
            f"max_tokens  {self.max_tokens}",
            f"expected    {self.expected_bytes / GIB:.3f} GiB at the cap, target {self.target_bytes / GIB:.3f} GiB, "
            f"margin {self.margin_bytes / GIB:.3f} GiB ({self.confidence:.1%} of micro-batches stay within the target)",
            f"fit         {self.base_bytes / GIB:.3f} GiB + {slope}, relative error {self.sigma:.2%}",
            *(f"note        {note}" for note in self.notes),
        ]
        by_tokens = self.records[np.argsort(self.records[:, 0] * self.records[:, 1], kind="stable")]
        shown = np.unique(np.linspace(0, len(by_tokens) - 1, _MOST_ROWS).astype(int))
        rows = []
        for samples, length, peak in by_tokens[shown]:
            expected = self.expected(samples * length, length)
            rows.append(
                [f"{samples * length:.0f}", f"{peak / GIB:.3f}", f"{expected / GIB:.3f}", f"{1 - expected / peak:+.1%}"]
            )
        return "\n".join([*lines, "", as_table(("tokens", "peak GiB", "expected", "error"), rows)])

    def to_dict(self) -> dict[str, Any]:
        """Everything but the records, as builtin values."""
        known = {name: value for name, value in vars(self).items() if name not in ("records", "notes")}
        return known | {"margin_bytes": self.margin_bytes, "records": len(self.records), "notes": list(self.notes)}


def fit_memory(
    records: Any, target_bytes: float, *, longest: int | None = None, confidence: float = 0.999
) -> MemoryFit:
    """Fit peaks and find the cap.

    Args:
        records: [n, 2] of (padded tokens, peak bytes) or [n, 3] of (samples, padded length, peak bytes), n >= 3, the
            most tokens 1.5 times the least or more; see `MemoryTracker.records` and `measure_memory`.
        target_bytes: what a peak must not exceed, in the bytes that were measured; see `target_for`.
        longest: longest sample that will be trained on; default: the longest of the records.
        confidence: of one micro-batch at the cap to stay within the target, 0.5 to below 1.

    Returns:
        The cap.

    Raises:
        ParameterError: bad or too few records, peaks that do not grow with the tokens, or a target that leaves no room.

    """
    target, confidence = check_target(target_bytes), check_confidence(confidence)
    table = _as_shapes(records)
    most = int(table[:, 1].max()) if longest is None else check_int("longest", longest, minimum=1)
    fit = _fit(table)
    worst = max(0.0, float((1.0 / (1.0 - fit.errors)).max()) - 1.0)
    quantile = t_quantile(confidence, fit.freedom)

    def expected(tokens: float) -> float:
        return float(_design(np.array([tokens / most]), np.array([most]), len(fit.coefficients))[0] @ fit.coefficients)

    def bound(tokens: float) -> float:
        row = _design(np.array([tokens / most]), np.array([most]), len(fit.coefficients))[0]
        middle = float(row @ fit.coefficients)
        spread = float(np.sqrt(row @ fit.covariance @ row + (fit.sigma * middle) ** 2))
        return middle + max(quantile * spread, worst * middle)

    # rounding of exact records must not cost a token
    limit = target * (1 + 1e-12)
    if bound(1) > limit:
        why = (
            ""
            if expected(1) > limit
            else f": {expected(1):.4g} is expected, but {len(table)} records that deviate by {fit.sigma:.1%} bound it "
            "no closer; measure more, and larger, micro-batches"
        )
        raise ParameterError(
            f"target_bytes must leave room for a micro-batch: it is {target:.4g}, and a single token takes up to "
            f"{bound(1):.4g}{why}"
        )
    low, high = 1, 2
    while bound(high) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bound(middle) <= limit else (low, middle)
    return MemoryFit(
        max_tokens=low,
        target_bytes=int(target),
        expected_bytes=round(expected(low)),
        longest=most,
        base_bytes=float(fit.coefficients[0]),
        bytes_per_token=float(fit.coefficients[1]),
        bytes_per_token2=float(fit.coefficients[2]) if len(fit.coefficients) == 3 else 0.0,
        sigma=fit.sigma,
        confidence=confidence,
        records=table,
        notes=(*cap_notes(table, low, most), *_outlier_notes(fit)),
    )


def check_target(target_bytes: Any) -> float:
    """Check a target of memory, in bytes."""
    target = check_float("target_bytes", target_bytes, minimum=1.0)
    if target > _MOST_BYTES:
        raise ParameterError(f"target_bytes must be at most {_MOST_BYTES:g}, got {target:g}")
    return target


def check_share(share: Any) -> float:
    """Check a share of a device's memory."""
    checked = check_float("share", share, minimum=0.0)
    if not 0.0 < checked <= 1.0:
        raise ParameterError(f"share must be above 0 and at most 1, got {checked}")
    return checked


def check_confidence(confidence: Any) -> float:
    """Check the share of micro-batches that must stay within the target."""
    checked = check_float("confidence", confidence, minimum=0.5)
    if checked >= 1.0:
        raise ParameterError(f"confidence must be below 1, got {checked}")
    return checked


def target_for(report: MemoryReport, share: float = 0.9) -> int:
    """Bytes that torch's allocator may hold for the device to be used up to a share of its memory.

    What lies outside the allocator now, in this and other processes, is taken off.

    Args:
        report: of the device, taken while it trains, so that contexts and communication buffers are there.
        share: of the device's memory, above 0 and up to 1.

    Raises:
        ParameterError: the report lacks a figure; it says which and why.
    """
    share = check_share(share)
    if report.total is None or report.elsewhere is None:
        name = "total" if report.total is None else "elsewhere"
        raise ParameterError(f"report has no figure for {name} of {report.device}: {report.reasons.get(name)}")
    target = int(share * report.total) - report.elsewhere
    if target <= 0:
        raise ParameterError(
            f"share must leave room: {share} of {report.total} bytes is less than the {report.elsewhere} bytes used "
            "outside the allocator"
        )
    return target


def _as_shapes(records: Any) -> Floats:
    """Checked records as samples, length and bytes; records of tokens become that many samples of length 1."""
    if getattr(records, "shape", None) == ():
        raise ParameterTypeError(f"records must be [n, 2] or [n, 3] numbers, got {quote(records)}")
    if not hasattr(records, "shape"):
        if isinstance(records, (str, bytes)) or not hasattr(records, "__iter__"):
            raise ParameterTypeError(f"records must be [n, 2] or [n, 3] numbers, got {quote(records)}")
        records = list(records)
    wide = len(records) > 0 and hasattr(records[0], "__len__") and len(records[0]) == 3
    names = ("samples", "length", "bytes") if wide else ("tokens", "bytes")
    table = check_records(records, names, whole=len(names) - 1)
    if not wide:
        table = np.insert(table, 1, 1.0, axis=1)
    tokens = table[:, 0] * table[:, 1]
    if len(table) < 3 or tokens.max() < _LEAST_SPAN * tokens.min():
        raise ParameterError(
            f"records must be at least 3, the most tokens at least {_LEAST_SPAN} times the least, got {len(table)} "
            f"from {tokens.min():.0f} to {tokens.max():.0f} tokens: measure smaller and larger micro-batches"
        )
    return table


def _design(samples: Floats, length: Floats, columns: int) -> Floats:
    tokens = samples * length
    return np.stack([np.ones_like(tokens), tokens, tokens * length][:columns], axis=1)


def _fit(table: Floats) -> LinearFit:
    samples, length, peaks = table.T
    fit = robust_fit(_design(samples, length, 2), peaks)
    if len(table) > 3 and length.max() > length.min():
        wide = robust_fit(_design(samples, length, 3), peaks)
        error = t_quantile(0.995, wide.freedom) * float(np.sqrt(wide.covariance[2, 2]))
        if wide.freedom > 0 and wide.condition < CANNOT_BE_TOLD and wide.coefficients[2] > error:
            fit = wide
    slope, error = float(fit.coefficients[1:].sum()), float(np.sqrt(fit.covariance[1, 1]))
    if slope == 0.0 or (len(fit.coefficients) == 2 and slope < 2 * error):
        raise ParameterError(
            "records must show a peak that grows with the tokens: measure larger micro-batches, until the peak is well "
            "above that of the smallest"
        )
    return fit


def cap_notes(records: Floats, cap: int, longest: int) -> tuple[str, ...]:
    """What to know before relying on a cap, from the records that it rests on."""
    notes = []
    measured = int((records[:, 0] * records[:, 1]).max())
    if cap > SURE_REACH * measured:
        notes.append(
            f"the cap is {cap / measured:.1f} times the largest measured micro-batch: measure one of {cap} tokens"
        )
    if cap < longest:
        notes.append(f"the longest sample, {longest} tokens, does not fit even alone")
    return tuple(notes)


def _outlier_notes(fit: LinearFit) -> list[str]:
    outliers = np.flatnonzero(~fit.kept).tolist()
    if not outliers:
        return []
    return [f"unlike the rest, counted only if above it: records {str(outliers[:8])[1:-1]}"]
