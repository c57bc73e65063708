"""Options that benches share."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.record import RESULTS


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Parser of one bench, with `--results`."""
    made = argparse.ArgumentParser(prog=f"python -m bench {name}", description=description)
    made.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where records go (bench/results)")
    return made


def add_traces(made: argparse.ArgumentParser) -> None:
    """Add `--traces`."""
    made.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help="folder of NAME.npz with an array `lengths` each, instead of the windows stored in tests/data",
    )
