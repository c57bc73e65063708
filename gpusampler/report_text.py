"""A report as text for a terminal: what was evaluated, the strategies, the floor, the caps."""

from __future__ import annotations

from gpusampler.report import Report, StrategyReport
from gpusampler.tables import as_table


def report_text(report: Report) -> str:
    """Lay out a report in paragraphs, at most 100 columns wide."""
    parts = [_setting(report), _strategies(report), "\n".join(_notes(report)), _floor(report)]
    return "\n\n".join(part for part in [*parts, _caps(report)] if part)


def _setting(report: Report) -> str:
    lengths, settings = report.lengths, report.settings
    groups = settings["dp_size"] * settings["grad_accum"]
    meet = "in every slot" if settings["sync"] == "microbatch" else "once a step"
    cost = "cost_fn(length)" if settings["alpha"] is None else f"length + {settings['alpha']:.4g} * length^2"
    evaluated, steps = len(report.ours.steps), settings["steps"]
    which = f"all {steps:,}" if evaluated == steps else f"{evaluated:,}, drawn at random from the {steps:,}"
    return "\n".join(
        [
            f"lengths   {lengths['count']:,} samples of {lengths['shortest']:,} to {lengths['longest']:,} tokens: mean "
            f"{lengths['mean']:,.0f}, median {lengths['median']:,.0f}, 99th percentile {lengths['p99']:,.0f}",
            f"step      {settings['effective_batch_size']:,} samples in {groups} micro-batches: {settings['dp_size']} "
            f"ranks x {settings['grad_accum']} slots, ranks meet {meet} (sync={settings['sync']})",
            f"cost      samples * ({cost}) at the longest of a micro-batch"
            + (f", + {settings['intercept']:,g}" if settings["intercept"] else ""),
            f"steps     {which} of epoch {settings['epoch']} (seed {settings['seed']})",
        ]
    )


def _strategies(report: Report) -> str:
    cap = report.settings["max_tokens"]
    head = ["strategy", "step cost\nvs ours", "/ bound\nmean", "\nworst", "/ tight\nbound"]
    head += ["padding", "idle", "peak\ntokens", "spread of\nsteps", "planning\nms/step"]
    head += [] if cap is None else ["over\ncap"]
    rows = []
    for each in report.strategies:
        row = [each.name, f"{each.relative:.3f}", f"{each.over_bound.mean():.3f}", f"{each.over_bound.max():.3f}"]
        row += [f"{each.over_tight.mean():.3f}", f"{each.padding:.1%}", f"{each.idle:.1%}"]
        row += [f"{each.figures.peak.max():,}", f"{each.spread:.1%}", f"{each.planning_ms:.2f}"]
        row += [] if cap is None else [f"{_over_cap(each, report):.1%}"]
        rows.append(row)
    return as_table(head, rows)


def _over_cap(each: StrategyReport, report: Report) -> float:
    groups: int = report.settings["dp_size"] * report.settings["grad_accum"]
    return float(each.figures.over_cap.sum()) / (groups * len(each.steps))


def _notes(report: Report) -> list[str]:
    notes = []
    for each in report.strategies:
        if len(each.steps) < len(report.ours.steps):
            notes.append(f"{each.name}: on {len(each.steps):,} of these steps, as it plans slowly.")
    notes += [f"{name}: left out, {reason}." for name, reason in report.left_out.items()]
    names = [each.name for each in report.strategies]
    if "transformers" in names:
        alpha = report.settings["alpha"]
        notes.append(
            "transformers plans with its fixed alpha 0.001"
            + (f"; 'transformers, alpha' with {alpha:g}." if "transformers, alpha" in names else ".")
        )
    if "length-grouped" in names:
        notes.append(
            "length-grouped fills a step with samples of like length: its steps differ from each other (spread), and\n"
            "a step is not a random sample of the data. All others have the same samples in the same steps."
        )
    notes.append(
        "bound: no grouping of a step's samples costs less, padding or not; tight bound: with the least padding\n"
        f"that so many micro-batches need ({len(report.ours.over_tight):,} steps)."
    )
    return notes


def _floor(report: Report) -> str:
    floor = report.floor
    share = f"{floor['bound_share']:.1%}" if floor["bound_share"] < 1 else "all"
    text = (
        f"floor     the longest sample of a step costs {floor['longest_over_fair_mean']:.2f} of a rank's fair share "
        f"(worst {floor['longest_over_fair_worst']:.2f})"
    )
    if not floor["bound_share"]:
        return text + ":\n          no step is bound by it"
    return text + (
        f":\n          {share} of the steps are bound by it, together they cost {floor['cost']:.3f} times what they "
        "would without;\n          larger steps, fewer ranks or shorter samples lower this floor"
    )


def _caps(report: Report) -> str:
    if not report.caps:
        return ""
    rows = []
    for each in report.caps:
        rows.append(
            [
                "none" if each.max_tokens is None else f"{each.max_tokens:,}",
                "-" if each.peak is None else f"{each.peak:,}",
                f"{each.unfit:.1%}",
                "none does" if each.grad_accum is None else str(each.grad_accum),
                "-" if each.relative is None else f"{each.relative:.3f}",
            ]
        )
    head = ["max_tokens", "peak\ntokens", "steps that\ndo not fit", "grad_accum\nneeded", "step cost\nvs none"]
    return f"what a cap costs ({report.cap_steps:,} steps)\n" + as_table(head, rows)
