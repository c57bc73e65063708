"""The picture of a demo."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from gpusampler.demo import DemoResult
from gpusampler.plot import check_plot, colour, new_figure, plain_ticks, save_figure


def plot_demo(result: DemoResult, path: str | os.PathLike[str]) -> None:
    """Write a picture of a demo: measured speed, step times, measured against modelled time, losses.

    Raises:
        ParameterError: matplotlib is not installed, or the file cannot be written.
    """
    check_plot(path)
    figure, ((speed, steps), (model, losses)) = new_figure(2, 2, (12, 8))
    _plot_speed(speed, result)
    _plot_steps(steps, result)
    _plot_model(model, result)
    _plot_losses(losses, result)
    settings = result.settings
    figure.suptitle(
        f"{settings.num_layers}-layer transformer on {settings.dp_size} processes ({settings.device}), lengths of "
        f"{settings.trace}, {settings.batch_size} samples a step in {settings.dp_size} x {settings.grad_accum} "
        "micro-batches"
    )
    save_figure(figure, path)


def _plot_speed(axes: Any, result: DemoResult) -> None:
    runs = result.runs
    values = [run.tokens_per_second for run in runs]
    axes.barh([run.name for run in runs], values, height=0.62, color=_colours(result))
    for place, value in enumerate(values):
        axes.text(value, place, f" {value:,.0f}  ({value / values[0]:.2f}x)", va="center")
    axes.set_xlim(0, max(values) * 1.3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens a second, without padding (times random)")
    axes.set_title("Measured speed")


def _plot_steps(axes: Any, result: DemoResult) -> None:
    for run, shade in zip(result.runs, _colours(result), strict=True):
        values = np.sort(run.seconds)
        axes.step(np.arange(1, len(values) + 1) / len(values), values, where="post", label=run.name, color=shade,
                  linewidth=2.2 if run is result.runs[-1] else 1.4)  # fmt: skip
    axes.set_ylim(0)
    axes.set_xlabel("share of steps, fastest first")
    axes.set_ylabel("seconds a step")
    axes.set_title("Measured step times")
    axes.legend(frameon=False, fontsize="small")


def _plot_model(axes: Any, result: DemoResult) -> None:
    for run, shade in zip(result.runs, _colours(result), strict=True):
        modelled = run.modelled.figures.cost * result.unit
        axes.scatter(modelled, run.seconds, s=14, alpha=0.6, color=shade, label=run.name)
    low, high = (pick([pick(run.seconds) for run in result.runs]) for pick in (min, max))
    axes.plot([low, high], [low, high], color="black", linewidth=1, linestyle=":", label="equal")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis, [digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5)])
    axes.set_xlabel("modelled seconds")
    axes.set_ylabel("measured seconds")
    axes.set_title("Each step: measured against modelled")
    axes.legend(frameon=False, fontsize="small")


def _plot_losses(axes: Any, result: DemoResult) -> None:
    for run, shade in zip(result.runs, _colours(result), strict=True):
        ours = run is result.runs[-1]
        axes.plot(np.cumsum(run.seconds), run.losses, color=shade, label=run.name, linewidth=2.2 if ours else 1.4)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("loss")
    axes.set_title("Loss over time")
    axes.legend(frameon=False, fontsize="small")


def _colours(result: DemoResult) -> list[str]:
    return [colour(place, len(result.runs)) for place in range(len(result.runs))]
