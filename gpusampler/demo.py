"""Train a small transformer with each way to make micro-batches, and set measured speed beside the modelled one.

The training is `gpusampler.demo_worker` under torchrun: real processes that wait for each other in every micro-batch.
The model's figures come from `gpusampler.report` on the same lengths, with the cost model that the workers fitted to
this machine before they trained. On two CPU cores the whole takes about two minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpusampler.cost import CostModel
from gpusampler.demo_worker import DemoSettings, demo_lengths, demo_sampler
from gpusampler.errors import ParameterError, check_choice, check_float, check_int
from gpusampler.report import StrategyReport, report_sampler
from gpusampler.strategies import unavailable
from gpusampler.tables import as_table
from gpusampler.traces import TRACES

DEMO_STRATEGIES = ("random", "length-grouped", "transformers", "gpusampler")

_SAMPLES_A_MICRO_BATCH = 8
_GRAD_ACCUM = 4
# Sizes with which a step of two processes takes about half a second on a CPU, or on GPUs.
_CPU_SIZES = {"mean_length": 64, "longest": 1024, "hidden_size": 128, "num_layers": 2, "num_heads": 2}
_GPU_SIZES = {"mean_length": 384, "longest": 8192, "hidden_size": 1024, "num_layers": 8, "num_heads": 16}


class DemoError(ChildProcessError):
    """The training processes failed; they have said why on standard error."""


@dataclass(frozen=True)
class DemoRun:
    """One strategy's training.

    Attributes:
        name: of the strategy.
        seconds: wall time of each step.
        losses: mean loss of each step over all targets.
        tokens_per_second: tokens without padding, over all steps and ranks.
        modelled: what the model says of the same steps.
    """

    name: str
    seconds: list[float]
    losses: list[float]
    tokens_per_second: float
    modelled: StrategyReport


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured; `str()` is the text for a terminal.

    Attributes:
        settings: what was trained.
        cost: fitted to this machine.
        unit: seconds that a unit of its cost takes.
        runs: peers first, gpusampler last.
        left_out: peers that are not installed, with the reason.
    """

    settings: DemoSettings
    cost: CostModel
    unit: float
    runs: list[DemoRun]
    left_out: dict[str, str]

    def relative(self, run: DemoRun) -> float:
        """Measured time of a strategy over that of gpusampler."""
        return sum(run.seconds) / sum(self.runs[-1].seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything as builtin values that json takes."""
        return {
            "settings": asdict(self.settings),
            "alpha": self.cost.alpha,
            "intercept": self.cost.intercept,
            "seconds_a_token": self.unit,
            "torch": torch.__version__,
            "left_out": self.left_out,
            "runs": [
                {
                    "name": run.name,
                    "tokens_per_second": run.tokens_per_second,
                    "median_step_seconds": float(np.median(run.seconds)),
                    "relative_time_measured": self.relative(run),
                    "modelled": run.modelled.to_dict(),
                    "modelled_step_seconds": (run.modelled.figures.cost * self.unit).tolist(),
                    "step_seconds": run.seconds,
                    "losses": run.losses,
                }
                for run in self.runs
            ],
        }

    def __str__(self) -> str:
        """A table and what it means."""
        rows = []
        for run in self.runs:
            modelled = run.modelled
            row = [run.name, f"{run.tokens_per_second:,.0f}", f"{1e3 * np.median(run.seconds):,.0f}"]
            row += [f"{self.relative(run):.2f}", f"{modelled.relative:.2f}", f"{modelled.over_bound.mean():.3f}"]
            row += [f"{modelled.padding:.1%}", f"{modelled.idle:.1%}", f"{modelled.figures.peak.max():,}"]
            rows.append([*row, f"{modelled.planning_ms:.2f}"])
        head = ["strategy", "tokens/s\nmeasured", "step ms\nmedian", "time vs ours\nmeasured", "\nmodelled"]
        head += ["step cost\n/ bound", "\npadding", "\nidle", "peak\ntokens", "planning\nms/step"]
        return "\n\n".join([as_table(head, rows), "\n".join(self._notes())])

    def _notes(self) -> list[str]:
        settings, ours = self.settings, self.runs[-1]
        notes = [f"{name}: left out, {reason}." for name, reason in self.left_out.items()]
        notes.append(
            f"{len(ours.seconds)} steps of {settings.batch_size} samples with each, {settings.dp_size} processes x "
            f"{settings.grad_accum} micro-batches, gradients averaged in each; {settings.device}."
        )
        notes.append(
            f"The cost model was fitted to this machine: alpha {self.cost.alpha:.2g}, intercept "
            f"{self.cost.intercept:.0f} tokens, {1e6 * self.unit:.0f} us a token."
        )
        same = [run for run in self.runs if run.name != "length-grouped"]
        apart = max(float(np.abs(np.subtract(run.losses, ours.losses)).max()) for run in same)
        if len(same) > 1:
            notes.append(
                f"{', '.join(run.name for run in same)} train on the same samples in each step, with weighted losses:\n"
                f"their losses, {ours.losses[0]:.3f} at first and {ours.losses[-1]:.3f} at last, differ by {apart:.0e} "
                "at most."
            )
        return notes


def run_demo(
    output: str | os.PathLike[str] = "demo",
    *,
    world_size: int = 2,
    num_steps: int | None = None,
    seconds: float = 60.0,
    trace: str = TRACES[0],
    seed: int = 42,
) -> DemoResult:
    """Train, print the table, and write `results.json` and, if matplotlib is installed, `demo.png`.

    Args:
        output: folder for the results, made if there is none.
        world_size: processes; they use GPUs if there is one for each, else the CPU.
        num_steps: optimizer steps with each strategy; None for as many as fit in `seconds`, at least 8.
        seconds: training time of all strategies together, without start-up.
        trace: lengths of the data, scaled down to what the machine trains in about half a second a step.
        seed: of data, shuffle and model.

    Returns:
        What was measured.

    Raises:
        ParameterError: a parameter out of range, or a folder that cannot be written.
        DemoError: the training failed.
    """
    world_size = check_int("world_size", world_size, minimum=1)
    gpus = torch.cuda.device_count() >= world_size
    left_out = unavailable(DEMO_STRATEGIES)
    try:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"output: folder {str(output)!r} cannot be made: {error.strerror}") from error
    settings = DemoSettings(
        trace=check_choice("trace", trace, TRACES),
        dp_size=world_size,
        grad_accum=_GRAD_ACCUM,
        batch_size=_SAMPLES_A_MICRO_BATCH * world_size * _GRAD_ACCUM,
        strategies=tuple(name for name in DEMO_STRATEGIES if name not in left_out),
        num_steps=None if num_steps is None else check_int("num_steps", num_steps, minimum=1),
        seconds=check_float("seconds", seconds, minimum=0.0),
        seed=check_int("seed", seed, minimum=0),
        device="cuda" if gpus else "cpu",
        **(_GPU_SIZES if gpus else _CPU_SIZES),
    )
    print(f"training with {', '.join(settings.strategies)} in {world_size} processes", file=sys.stderr)
    result = _result(settings, _train(settings), left_out)
    print(result)
    _save(result, folder)
    return result


def _train(settings: DemoSettings) -> dict[str, Any]:
    """Run the workers under torchrun; returns what rank 0 wrote."""
    environment = dict(os.environ)
    if settings.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        given, written = Path(folder) / "settings.json", Path(folder) / "result.json"
        given.write_text(json.dumps(asdict(settings)), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={settings.dp_size}", "-m", "gpusampler.demo_worker", str(given), str(written)]
        code = subprocess.run(command, env=environment, check=False).returncode
        if code != 0:
            raise DemoError(f"the training processes failed with exit code {code}, see their messages above")
        result: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return result


def _result(settings: DemoSettings, measured: dict[str, Any], left_out: dict[str, str]) -> DemoResult:
    """Join the measured times with the model's figures of the same steps."""
    cost = CostModel(alpha=measured["alpha"], intercept=measured["intercept"])
    num_steps = len(measured["runs"][0]["seconds"])
    sampler = demo_sampler(settings, demo_lengths(settings, num_steps), cost, 0)
    report = report_sampler(sampler, max_steps=num_steps, peers=settings.strategies[:-1])
    runs = []
    for run, modelled in zip(measured["runs"], report.strategies, strict=True):
        speed = float(modelled.figures.tokens.sum()) / sum(run["seconds"])
        runs.append(DemoRun(run["name"], run["seconds"], run["losses"], speed, modelled))
    return DemoResult(settings, cost, measured["seconds_a_token"], runs, left_out)


def _save(result: DemoResult, folder: Path) -> None:
    try:
        (folder / "results.json").write_text(json.dumps(result.to_dict(), indent=2), encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"output: {folder} cannot be written: {error.strerror}") from error
    print(f"\nresults: {folder / 'results.json'}")
    try:
        from gpusampler.demo_plot import plot_demo

        plot_demo(result, folder / "demo.png")
        print(f"picture: {folder / 'demo.png'}")
    except ParameterError as error:
        print(f"no picture: {error}", file=sys.stderr)
