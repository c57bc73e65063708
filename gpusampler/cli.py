"""`gpusampler report | demo | tasks | calibrate | memory | fit-memory`: the command line.

Results go to standard output, progress and errors to standard error. Exit code 0; 2 with one line for a user's
mistake; 1 if the processes of the demo failed; 130 when interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn, TextIO

from gpusampler import measure_cli
from gpusampler._version import __version__
from gpusampler.cost import CostModel
from gpusampler.errors import ParameterError
from gpusampler.readers import FORMATS, read_lengths
from gpusampler.tasks import cli as tasks_cli
from gpusampler.traces import TRACES, load_trace

_EPILOG = """
FILE holds one length a sample: an npy or npz array, a column of csv, tsv, json, jsonl or parquet, or text with a
length a line (also on standard input). A column of lists (input_ids) counts its items.

examples:
  gpusampler report lengths.npy --dp-size 8 --grad-accum 4 --batch-size 512
  gpusampler report train.parquet --column input_ids --dp-size 8 --batch-size 256 --max-tokens 16384 --plot report.png
  wc -w texts/*.txt | awk '$2 != "total" {print $1}' | gpusampler report --dp-size 2 --batch-size 64
  gpusampler report --trace alpaca_eval_rollouts --dp-size 8 --grad-accum 4 --batch-size 512
"""


_OPTIONS = {
    "effective_batch_size": "--batch-size",
    "dp_size": "--dp-size",
    "grad_accum": "--grad-accum",
    "max_tokens": "--max-tokens",
    "max_steps": "--steps",
    "num_steps": "--steps",
    "world_size": "--world-size",
    "oversize='alone'": "--oversize alone",
    "with drop_last=True": "without --keep-last",
}
"""What the command line calls the parameters that errors name."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"gpusampler: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments after the program's name; default: those of this process.

    Returns:
        Exit code.
    """
    try:
        arguments = _parser().parse_args(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = arguments.func(arguments)
            sys.stdout.flush()
        return code
    except SystemExit as stop:
        return int(stop.code or 0)
    except ParameterError as error:
        print(f"gpusampler: error: {_in_options(str(error))}", file=sys.stderr)
        return 2
    except ChildProcessError as error:
        print(f"gpusampler: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # whoever read standard output has gone; what is still buffered must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="gpusampler", description="Balanced, memory-bounded micro-batches: look before you train."
    )
    parser.add_argument("--version", action="version", version=f"gpusampler {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_report(commands)
    _add_demo(commands)
    tasks_cli.register(commands)
    measure_cli.register(commands)
    return parser


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="what the sampler would do for your lengths",
        description="Balance, padding and peak memory of an epoch of your data, beside other ways to batch it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(func=_report)
    parser.add_argument("file", nargs="?", metavar="FILE", help="lengths; '-' or nothing: standard input")
    parser.add_argument("--trace", choices=TRACES, help="use a length trace of this package in place of FILE")
    parser.add_argument("--column", help="column, field or array of FILE, by name or by number from 1")
    parser.add_argument("--format", choices=FORMATS, help="format of FILE; default: by its extension")

    shape = parser.add_argument_group("training")
    shape.add_argument(
        "--batch-size", type=int, required=True, metavar="B", help="samples an optimizer step, all ranks"
    )
    shape.add_argument("--dp-size", type=int, default=1, metavar="D", help="data-parallel ranks (default 1)")
    shape.add_argument(
        "--grad-accum", type=int, default=1, metavar="G", help="micro-batches a rank accumulates (default 1)"
    )
    shape.add_argument("--sync", choices=("microbatch", "step"), default="microbatch", help="when ranks wait for each "
                       "other: in every micro-batch (default) or once a step (DDP with no_sync)")  # fmt: skip
    shape.add_argument("--max-tokens", type=int, metavar="N", help="largest padded tokens of a micro-batch")
    shape.add_argument("--oversize", choices=("error", "alone"), default="error", help="a sample longer than "
                       "--max-tokens is an error (default) or a micro-batch of its own")  # fmt: skip
    shape.add_argument("--seed", type=int, default=42, help="of the shuffle (default 42)")
    shape.add_argument("--epoch", type=int, default=0, help="which epoch to look at (default 0)")
    shape.add_argument("--no-shuffle", action="store_true", help="take samples in the order of FILE")
    shape.add_argument("--keep-last", action="store_true", help="keep the last, smaller step of the epoch")

    cost = parser.add_argument_group("cost of a sample: length + alpha * length^2")
    which = cost.add_mutually_exclusive_group()
    which.add_argument("--alpha", type=float, metavar="A", help="1 / length at which attention costs as much as all "
                       "the rest (default 1e-4)")  # fmt: skip
    which.add_argument("--config", metavar="JSON", help="take alpha from a model's config.json")
    cost.add_argument("--intercept", type=float, default=0.0, metavar="I", help="cost of a micro-batch besides its "
                      "samples, in tokens (default 0)")  # fmt: skip

    output = parser.add_argument_group("output")
    output.add_argument("--steps", type=int, default=1000, metavar="N", help="steps to evaluate, a random sample of "
                        "the epoch's if it has more (default 1000)")  # fmt: skip
    output.add_argument("--plot", metavar="PNG", help="also write a picture (png, svg or pdf)")
    output.add_argument("--json", action="store_true", help="print one JSON object, not a table")


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="train a small transformer with each sampler and time it",
        description="Train a small transformer on data with the lengths of a real trace, under torchrun, once with "
        "each way to make micro-batches, and compare measured speed with the model's.",
    )
    parser.set_defaults(func=_demo)
    parser.add_argument(
        "--output", default="demo", metavar="DIR", help="where results.json and demo.png go (default demo)"
    )
    parser.add_argument("--world-size", type=int, default=2, metavar="D", help="processes (default 2)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps with each sampler; default: as many as "
                        "--seconds allow")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=60.0, help="time to train, all samplers together, without "
                        "start-up (default 60)")  # fmt: skip
    parser.add_argument("--trace", choices=TRACES, default=TRACES[0], help=f"lengths of the data (default {TRACES[0]})")
    parser.add_argument("--seed", type=int, default=42, help="of shuffle and model (default 42)")


def _report(arguments: argparse.Namespace) -> int:
    from gpusampler.plot import check_plot, plot_report
    from gpusampler.report import report_sampler
    from gpusampler.sampler import GPUBatchRebalanceSampler
    from gpusampler.strategies import STRATEGIES

    if arguments.plot is not None:
        check_plot(arguments.plot)
    cost = _cost(arguments)
    sampler = GPUBatchRebalanceSampler(
        _lengths(arguments),
        arguments.batch_size,
        arguments.dp_size,
        arguments.grad_accum,
        shuffle=not arguments.no_shuffle,
        seed=arguments.seed,
        rank=0,
        drop_last=not arguments.keep_last,
        cost=cost,
        max_tokens=arguments.max_tokens,
        oversize=arguments.oversize,
        sync=arguments.sync,
        process_group=None,
    )
    sampler.set_epoch(arguments.epoch)
    report = report_sampler(sampler, max_steps=arguments.steps, peers=STRATEGIES[:-1], caps=True, progress=None)
    print(json.dumps(report.to_dict(), indent=2, allow_nan=False) if arguments.json else report)
    if arguments.plot is not None:
        plot_report(report, arguments.plot)
        print(f"picture: {arguments.plot}", file=sys.stderr)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from gpusampler.demo import run_demo

    run_demo(
        arguments.output,
        world_size=arguments.world_size,
        num_steps=arguments.steps,
        seconds=arguments.seconds,
        trace=arguments.trace,
        seed=arguments.seed,
    )
    return 0


def _lengths(arguments: argparse.Namespace) -> object:
    if arguments.trace is not None:
        if arguments.file is not None:
            raise ParameterError(f"give FILE or --trace, not both: got {arguments.file!r} and {arguments.trace!r}")
        return load_trace(arguments.trace)
    if arguments.file is None and sys.stdin.isatty():
        raise ParameterError("no lengths: give FILE, --trace, or lengths on standard input")
    return read_lengths(arguments.file or "-", column=arguments.column, format=arguments.format)


def _cost(arguments: argparse.Namespace) -> CostModel:
    if arguments.config is None:
        alpha = CostModel.alpha if arguments.alpha is None else arguments.alpha
        return CostModel(alpha=alpha, intercept=arguments.intercept)
    try:
        with open(arguments.config, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise ParameterError(f"config {arguments.config!r} cannot be read: {error}") from error
    return CostModel.from_config(config, intercept=arguments.intercept)


def _in_options(message: str) -> str:
    for name, option in _OPTIONS.items():
        # not inside a file's name
        message = re.sub(rf"(?<![\w./'-]){name}(?![\w./-])", option, message)
    return " ".join(message.split())


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"gpusampler: warning: {_in_options(str(message))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
