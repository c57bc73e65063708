"""`gpusampler tasks CONFIG`: what a multi-task run of a configuration can be expected to do, before it runs.

Prints, for every task and for the sources of tasks with several, the probability, the batches of a nominal epoch, the
expected visits and nominal epochs, and how far one run can stray from them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusampler.errors import ParameterError, quote
from gpusampler.tasks.config import schedule_from_config
from gpusampler.tasks.expected import CONFIDENCE, ExpectedVisits, expected_visits
from gpusampler.tasks.schedule import TaskSchedule

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def register(subparsers: Subparsers) -> None:
    """Add the `tasks` command, whose `func` takes the parsed arguments and returns an exit code."""
    parser = subparsers.add_parser(
        "tasks",
        help="expected visits and nominal epochs of a multi-task configuration",
        description="Expected visits and nominal epochs of every task in a run, and how far one run can stray.",
    )
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="JSON file that describes tasks, sources and policy"
    )
    parser.add_argument(
        "--num-steps", type=int, help="optimizer steps, where the configuration has no budget of its own"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 0, or 2 with one line on stderr if the configuration cannot be honoured."""
    try:
        config = _read(arguments.config)
        schedule = schedule_from_config(config, arguments.config.parent)
        if None not in (arguments.num_steps, schedule.num_steps):
            raise ParameterError(
                f"--num-steps {quote(arguments.num_steps)} is for configurations without a budget; "
                f"this one has {schedule.num_steps} steps"
            )
        rows = expected_visits(schedule, arguments.num_steps)
    except (OSError, ParameterError) as error:
        print(f"gpusampler tasks: {arguments.config}: {error}", file=sys.stderr)
        return 2
    steps = schedule.num_steps if arguments.num_steps is None else arguments.num_steps
    print(_as_json(schedule, steps, rows) if arguments.json else _as_text(schedule, steps, rows))
    return 0


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, an int of too many digits, nested too deep
        raise ParameterError(str(error)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without repeated names, of which JSON readers silently keep the last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ParameterError(f"{name!r} occurs twice in one object")
        found[name] = value
    return found


def _as_json(schedule: TaskSchedule, steps: int | None, rows: list[ExpectedVisits]) -> str:
    head = {"num_steps": steps, "excluded": list(schedule.excluded), "confidence": CONFIDENCE}
    return json.dumps({**schedule.table(), **head, "expected": [asdict(row) for row in rows]}, indent=2)


def _as_text(schedule: TaskSchedule, steps: int | None, rows: list[ExpectedVisits]) -> str:
    table = [("task", "probability", "epoch steps", "visits", "+-", "nominal epochs", "+-")]
    for row in rows:
        name = _printable(row.task)
        if row.source is not None:
            name = f"  {name}/{row.source if row.name is None else _printable(row.name)}"
        spread = row.stray / row.batches if row.batches else 0.0
        numbers = (f"{row.visits:.1f}", f"{row.stray:.1f}", f"{row.passes:.4g}", f"{spread:.2g}")
        table.append((name, f"{row.probability:.6f}", str(row.batches), *numbers))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [
        f"policy {schedule.policy} (version {schedule.policy_version}), draw {schedule.draw}, "
        f"seed {schedule.seed}, {steps} steps"
    ]
    for line in table:
        figures = (text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))
        lines.append("  ".join([line[0].ljust(widths[0]), *figures]))
    if schedule.excluded:
        lines.append(f"excluded: {', '.join(map(_printable, schedule.excluded))}")
    lines.append(f"+- holds in {CONFIDENCE:.1%} of runs for independent draws, always for low-discrepancy task draws")
    return "\n".join(lines)


def _printable(name: str) -> str:
    """A name on one line of a terminal: quoted where it has line ends or control characters."""
    return name if name.isprintable() else repr(name)
