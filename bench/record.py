"""Records of what a bench measured: where, with what, and the figures; one JSON and one Markdown file a run and day."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
_PACKAGES = ("gpusampler", "torch", "numpy", "numba", "transformers", "triton")


@dataclass
class Record:
    """What a bench found, in the order it is to be read.

    Attributes:
        name: of the bench, and of its files.
        argv: options the bench was given.
        lines: Markdown.
        figures: the same as data, for other programs.
    """

    name: str
    argv: list[str]
    lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def say(self, *lines: str) -> None:
        """Add Markdown lines and print them."""
        self.lines += lines
        print(*lines, sep="\n", flush=True)

    def table(self, header: list[str], rows: list[list[Any]]) -> None:
        """Add a Markdown table, columns padded to read well as text too."""
        cells = [header, *[[_cell(value) for value in row] for row in rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        # first column to the left, figures to the right
        text = [
            [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))]
            for r in cells
        ]
        rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
        self.say("", *[f"| {' | '.join(row)} |" for row in [text[0], rule, *text[1:]]], "")

    def target(self, what: str, reached: bool, value: str) -> bool:
        """Add one line on a target, and its outcome to the figures."""
        self.figures.setdefault("targets", {})[what] = {"reached": reached, "value": value}
        self.say(f"- {'reached' if reached else 'MISSED '} | {what}: {value}")
        return reached

    def write(self, folder: Path) -> Path:
        """Write `<date>-<name>.json` and `.md`; returns the latter's path."""
        about = environment(self.name, self.argv)
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"{about['date'][:10]}-{self.name}"
        stem.with_suffix(".json").write_text(json.dumps(about | {"figures": self.figures}, indent=1) + "\n")
        facts = [f"{key}: {value}" for key, value in about.items() if key != "versions"]
        versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
        head = [f"# Bench: {self.name}", "", *[f"- {fact}" for fact in facts], f"- versions: {versions}", ""]
        text = "\n".join(head + self.lines)
        page = stem.with_suffix(".md")
        page.write_text(text.rstrip() + "\n")
        print(f"\nwritten: {os.path.relpath(page)} and .json")
        return page


def environment(name: str, argv: list[str]) -> dict[str, Any]:
    """Date, command, commit, machine and versions."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench", name, *argv]),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f} in the last minute" if hasattr(os, "getloadavg") else "unknown",
        "gpu": _gpu(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": {package: version for package in _PACKAGES if (version := _version(package))},
    }


def _commit() -> str:
    """Commit of the working tree; "+ changes" if a tracked file outside the results differs from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", "gpusampler", "kernels", "bench/*.py"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" + changes" if changed else "")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
