"""Pictures of a report and of a demo, as files. matplotlib is imported when a picture is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpusampler.errors import ParameterError
from gpusampler.report import Report

_OURS = "#1b7f5c"
_PEERS = ("#b5443b", "#d98a3a", "#6d7fb3", "#9aa6c9")
_PARTS = (("computing samples", "#1b7f5c"), ("computing padding", "#e0b04a"), ("waiting", "#c9c9c9"))


def check_plot(path: str | os.PathLike[str]) -> None:
    """Find out before the work that a picture could not be written after it.

    Raises:
        ParameterError: matplotlib is not installed, it does not know the extension, or there is no such folder.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ParameterError("pictures need matplotlib: pip install 'gpusampler[report]'") from error
    name = os.fspath(path)
    known = Figure().canvas.get_supported_filetypes()
    extension = os.path.splitext(name)[1][1:].lower()
    if extension not in known:
        raise ParameterError(f"plot must end in one of {', '.join('.' + each for each in known)}, got {name!r}")
    folder = os.path.dirname(name) or "."
    if not os.path.isdir(folder):
        raise ParameterError(f"plot: no such folder: {folder!r}")


def plot_report(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a picture of a report; its format follows from the extension.

    Four panels: where the step time goes in each strategy, the spread of step costs, the lengths, and peak tokens.

    Raises:
        ParameterError: as `check_plot`.
    """
    check_plot(path)
    figure, ((parts, spread), (lengths, caps)) = new_figure(2, 2, (12, 8))
    _plot_parts(parts, report)
    _plot_spread(spread, report)
    _plot_lengths(lengths, report)
    _plot_peaks(caps, report)
    settings = report.settings
    figure.suptitle(
        f"{report.lengths['count']:,} samples, {settings['effective_batch_size']:,} a step on "
        f"{settings['dp_size']} ranks x {settings['grad_accum']} slots, sync={settings['sync']}"
    )
    save_figure(figure, path)


def colour(position: int, count: int) -> str:
    """Colour of a strategy among `count`, the last of which is gpusampler."""
    return _OURS if position == count - 1 else _PEERS[position % len(_PEERS)]


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns)
    for each in np.ravel(axes):
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure; an error names the file."""
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ParameterError(f"plot: {os.fspath(path)} cannot be written: {error.strerror}") from error


def _plot_parts(axes: Any, report: Report) -> None:
    """Stacked bars over the fair share: the samples themselves, their padding, waiting for the slowest rank."""
    names = [each.name for each in report.strategies]
    figures = [each.figures for each in report.strategies]
    fair, work, cost = (
        np.array([float(part.sum()) for part in parts])
        for parts in zip(*((each.fair, each.work, each.cost) for each in figures), strict=True)
    )
    left = np.zeros(len(names))
    for (label, shade), width in zip(_PARTS, (fair, work - fair, cost - work), strict=True):
        axes.barh(names, width / fair, left=left, color=shade, label=label, height=0.62)
        left += width / fair
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.2f}", va="center")
    axes.axvline(report.floor["cost"], color="black", linewidth=1, linestyle=":", label="lower bound")
    axes.set_xlim(0, left.max() * 1.12)
    axes.set_xlabel("modelled time over that of the samples alone, on equally busy ranks")
    axes.set_title("Where the step time goes")
    axes.legend(frameon=False, loc="lower right" if left[0] < left[-1] else "upper right", fontsize="small")


def _plot_spread(axes: Any, report: Report) -> None:
    """Step cost over bound of each step, sorted."""
    for place, each in enumerate(report.strategies):
        values = np.sort(each.over_bound)
        axes.step(
            np.arange(1, len(values) + 1) / len(values), values, where="post", label=each.name,
            color=colour(place, len(report.strategies)), linewidth=2.2 if each is report.ours else 1.4,
        )  # fmt: skip
    highest = max(float(each.over_bound.max()) for each in report.strategies)
    axes.set_yscale("log")
    axes.set_ylim(0.97, 1.1 * highest)
    plain_ticks(axes.yaxis, [1, 1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2] if highest < 2 else [1, 1.5, 2, 3, 5, 10, 20, 50])
    axes.set_xlabel("share of steps, lowest first")
    axes.set_ylabel("step cost over its lower bound")
    axes.set_title("How even the steps are")
    axes.legend(frameon=False, fontsize="small")


def _plot_lengths(axes: Any, report: Report) -> None:
    shortest, longest = report.lengths["shortest"], report.lengths["longest"]
    heavy = longest > 8 * report.lengths["median"]
    if heavy:
        bins = np.unique(np.geomspace(shortest, longest + 1, 60).astype(np.int64))
        axes.set_xscale("log")
    else:
        bins = np.unique(np.linspace(shortest, longest + 1, 60).astype(np.int64))
    if len(bins) < 2:
        bins = np.array([shortest, shortest + 1])
    axes.hist(report.sample, bins=bins, color="#6d7fb3")
    for name, label, style in (("median", "median", "--"), ("p99", "99th percentile", ":")):
        value = report.lengths[name]
        axes.axvline(value, color="black", linewidth=1, linestyle=style, label=f"{label} {value:,.0f}")
    axes.legend(frameon=False, fontsize="small")
    axes.set_xlabel("length")
    axes.set_ylabel("samples")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("Lengths")


def _plot_peaks(axes: Any, report: Report) -> None:
    from matplotlib.ticker import MaxNLocator

    names = [each.name for each in report.strategies]
    peaks = [int(each.figures.peak.max()) for each in report.strategies]
    axes.barh(names, peaks, height=0.62, color=[colour(place, len(names)) for place in range(len(names))])
    for place, peak in enumerate(peaks):
        axes.text(peak, place, f" {peak:,}", va="center")
    axes.set_xlim(0, max(peaks) * 1.2)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    cap = report.settings["max_tokens"]
    if cap is not None:
        axes.axvline(cap, color="black", linewidth=1, linestyle=":", label=f"max_tokens {cap:,}")
        axes.legend(frameon=False, fontsize="small")
    axes.set_xlabel("padded tokens of the largest micro-batch")
    axes.set_title("Peak, which memory has to hold")


def plain_ticks(axis: Any, ticks: Sequence[float]) -> None:
    """Label an axis at these values, without powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
