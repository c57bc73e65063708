"""`gpusampler calibrate | memory | fit-memory`: cost model and cap from measurements.

Results go to standard output; a `ParameterError` is a user's mistake, for the caller to print.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusampler.alpha_price import price_alphas, price_table
from gpusampler.calibrate import fit_cost
from gpusampler.dry_run import measure_memory
from gpusampler.errors import ParameterError, check_float, check_int
from gpusampler.fit_memory import MemoryFit, check_share, fit_memory
from gpusampler.memory import MemoryTracker, memory_report
from gpusampler.memory_report import GIB
from gpusampler.nvml import device_count
from gpusampler.over_cap import steps_over
from gpusampler.readers import read_lengths
from gpusampler.records import BYTES, LENGTH, SAMPLES, SECONDS, TOKENS, read_records
from gpusampler.sampler import GPUBatchRebalanceSampler
from gpusampler.tables import as_table

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_MOST_OVER = 12
_MOST_WATCH = 1e6


def register(subparsers: Subparsers) -> None:
    """Add the three commands, whose `func` takes the parsed arguments and returns an exit code."""
    _add_calibrate(subparsers)
    _add_memory(subparsers)
    _add_fit_memory(subparsers)


def _add_calibrate(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        allow_abbrev=False,
        help="fit the cost model to measured times of micro-batches",
        description="Fit alpha and intercept to times of micro-batches, and price a wrong alpha on your own lengths.",
    )
    parser.set_defaults(func=run_calibrate)
    parser.add_argument("file", type=Path, metavar="FILE", help="csv, tsv, jsonl, json or npy with columns samples, "
                        "length (padded) and seconds, in this order without names")  # fmt: skip
    _add_where(parser)
    parser.add_argument("--no-intercept", action="store_true", help="take the cost of an empty micro-batch as 0")
    _add_training(parser, "what a wrong alpha costs on your lengths")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not tables")


def _add_memory(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "memory",
        allow_abbrev=False,
        help="memory of the devices, as the driver sees it",
        description="Memory of the devices now or over a while. Starts no CUDA context.",
    )
    parser.set_defaults(func=run_memory)
    parser.add_argument("--device", type=int, metavar="N", help="CUDA index (default: every visible device)")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="poll one device for so long, or until "
                        "interrupted")  # fmt: skip
    parser.add_argument("--interval", type=float, default=0.05, metavar="SECONDS", help="between polls (default 0.05)")
    parser.add_argument("--plot", metavar="PNG", help="with --watch: also write a picture (png, svg or pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def _add_fit_memory(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "fit-memory",
        allow_abbrev=False,
        help="the largest max_tokens that fits your memory",
        description="Fit max_tokens to peaks of micro-batches, measured before or by a dry run of your own step.",
    )
    parser.set_defaults(func=run_fit_memory)
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="csv, tsv, jsonl, json or npy with the "
                        "columns tokens (padded) and bytes, or samples, length and bytes; or what MemoryTracker.save "
                        "wrote")  # fmt: skip
    _add_where(parser)
    parser.add_argument("--dry-run", metavar="MODULE:FUNCTION", help="in place of FILE: run FUNCTION(samples, length), "
                        "one training step of a micro-batch of that shape, with growing micro-batches")  # fmt: skip
    parser.add_argument("--length", type=int, action="append", metavar="L", help="padded length for --dry-run, also "
                        "several times; include the longest")  # fmt: skip
    parser.add_argument("--device", type=int, metavar="N", help="CUDA index (default 0)")
    parser.add_argument("--target-gib", type=float, metavar="GIB", help="what a peak must not exceed")
    parser.add_argument("--share", type=float, default=0.9, help="without --target-gib: share of the device's memory, "
                        "less what is used outside of torch's allocator (default 0.9)")  # fmt: skip
    parser.add_argument("--longest", type=int, metavar="L", help="longest sample that will be trained on")
    parser.add_argument("--confidence", type=float, default=0.999, help="of one micro-batch at the cap to stay within "
                        "the target (default 0.999)")  # fmt: skip
    _add_training(parser, "steps of your lengths that would exceed the cap")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not tables")


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE", help="take rows of FILE with "
                        "this value only; also several times")  # fmt: skip


def _add_training(parser: argparse.ArgumentParser, title: str) -> None:
    group = parser.add_argument_group(title)
    group.add_argument("--lengths", metavar="FILE", help="lengths of your samples, in a format of `gpusampler report`")
    group.add_argument("--column", help="column, field or array of the lengths' file")
    group.add_argument("--batch-size", type=int, metavar="B", help="samples an optimizer step, all ranks")
    group.add_argument("--dp-size", type=int, default=1, metavar="D", help="data-parallel ranks (default 1)")
    group.add_argument("--grad-accum", type=int, default=1, metavar="G", help="micro-batches a rank (default 1)")
    group.add_argument("--sync", choices=("microbatch", "step"), default="microbatch", help="when ranks wait")
    group.add_argument("--steps", type=int, default=32, metavar="N", help="steps to plan (default 32)")


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Fit and print."""
    records = read_records(arguments.file, [(SAMPLES, LENGTH, SECONDS)], _where(arguments))
    found = fit_cost(records, intercept=False if arguments.no_intercept else None)
    sampler = _sampler(arguments)
    prices = None if sampler is None else price_alphas(sampler, found.model, max_steps=arguments.steps)
    if arguments.json:
        print(json.dumps(found.to_dict() | {"prices": [price._asdict() for price in prices or []]}))
        return 0
    print(found.table())
    if prices is not None:
        print(f"\n{price_table(prices, found.model)}")
    print(f"\ncost=CostModel(alpha={found.model.alpha:.6g}, intercept={found.model.intercept:.6g})")
    return 0


def run_memory(arguments: argparse.Namespace) -> int:
    """Report or watch."""
    if arguments.watch is not None:
        seconds = check_float("watch", arguments.watch, minimum=0.0)
        if seconds > _MOST_WATCH:
            raise ParameterError(f"watch must be at most {_MOST_WATCH:g} seconds, got {seconds:g}")
        if arguments.plot is not None:
            from gpusampler.plot import check_plot

            check_plot(arguments.plot)
        tracker = MemoryTracker(arguments.device, interval=arguments.interval)
        with suppress(KeyboardInterrupt), tracker:
            time.sleep(seconds)
        report = f"{memory_report(arguments.device).table()}\n{tracker.timeline_summary()}"
        print(json.dumps(tracker.to_dict()) if arguments.json else report)
        if arguments.plot is not None:
            tracker.plot(arguments.plot)
        return 0
    if arguments.plot is not None:
        raise ParameterError("--plot needs --watch: a picture is of a timeline")
    devices = (
        range(max(1, device_count()))
        if arguments.device is None
        else [check_int("device", arguments.device, minimum=0)]
    )
    reports = [memory_report(index) for index in devices]
    if arguments.json:
        print(json.dumps([report.to_dict() for report in reports]))
    else:
        print("\n\n".join(report.table() for report in reports))
    return 0


def run_fit_memory(arguments: argparse.Namespace) -> int:
    """Fit and print; the steps above the cap too, where lengths are given."""
    fit = _dry_run(arguments) if arguments.dry_run is not None else _fit_file(arguments)
    sampler = _sampler(arguments)
    over = None if sampler is None else steps_over(fit, sampler, arguments.steps)
    if arguments.json:
        print(json.dumps(fit.to_dict() | {"over": [each._asdict() for each in over or []]}))
        return 0
    print(fit.table())
    if sampler is not None and over is not None:
        steps, looked = len({each.step for each in over}), min(arguments.steps, len(sampler) // sampler.grad_accum)
        print(f"\nwithout a cap, {len(over)} micro-batches in {steps} of the first {looked} steps exceed it")
        rows = [[*map(str, each[:4]), f"{each.expected_bytes / GIB:.3f}"] for each in over[:_MOST_OVER]]
        if rows:
            print(as_table(("step", "slot", "rank", "tokens", "expected GiB"), rows))
    return 0


def _fit_file(arguments: argparse.Namespace) -> MemoryFit:
    if arguments.file is None:
        raise ParameterError("fit-memory needs a FILE of measured peaks, or --dry-run MODULE:FUNCTION")
    records = read_records(arguments.file, [(SAMPLES, LENGTH, BYTES), (TOKENS, BYTES)], _where(arguments))
    if arguments.target_gib is not None:
        target = check_float("target-gib", arguments.target_gib) * GIB
    else:
        report = memory_report(arguments.device)
        # this process trains nothing: what the device holds now is what it will hold besides
        if report.total is None or report.used is None:
            raise ParameterError(
                f"--target-gib must be given: no figures of {report.device} ({report.reasons['total']})"
            )
        target = check_share(arguments.share) * report.total - report.used
        if target < 1:
            raise ParameterError(
                f"--share must leave room: {arguments.share} of {report.total} bytes is less than the {report.used} "
                f"bytes of {report.device} that are used now"
            )
    return fit_memory(records, target, longest=arguments.longest, confidence=arguments.confidence)


def _dry_run(arguments: argparse.Namespace) -> MemoryFit:
    if arguments.file is not None:
        raise ParameterError("fit-memory takes a FILE or --dry-run, not both")
    if not arguments.length:
        raise ParameterError("--dry-run needs --length, the padded length to measure; include the longest")
    return measure_memory(
        _load(arguments.dry_run),
        arguments.length,
        target_bytes=None if arguments.target_gib is None else check_float("target-gib", arguments.target_gib) * GIB,
        share=arguments.share,
        device=arguments.device,
        confidence=arguments.confidence,
    )


def _load(name: str) -> Callable[[int, int], Any]:
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        step: Callable[[int, int], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        raise ParameterError(f"--dry-run must be MODULE:FUNCTION, got {name!r}: {error}") from error
    finally:
        sys.path.remove("")
    return step


def _where(arguments: argparse.Namespace) -> dict[str, str]:
    pairs = [text.partition("=") for text in arguments.where]
    for name, sign, _ in pairs:
        if not (name and sign):
            raise ParameterError(f"--where must be COLUMN=VALUE, got {name!r}")
    return {name: value for name, _, value in pairs}


def _sampler(arguments: argparse.Namespace) -> GPUBatchRebalanceSampler | None:
    if arguments.lengths is None:
        return None
    if arguments.batch_size is None:
        raise ParameterError("--lengths needs --batch-size")
    return GPUBatchRebalanceSampler(
        read_lengths(arguments.lengths, column=arguments.column),
        arguments.batch_size,
        arguments.dp_size,
        arguments.grad_accum,
        rank=0,
        sync=arguments.sync,
        process_group=None,
        drop_last=False,
    )
