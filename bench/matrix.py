"""Triton versions: the kernels under every supported one, interpreted and compiled ahead of time.

Each version is installed beside the packages of this environment, in a folder that shadows its Triton, and gets the
tests of `tests/interpret` and every variant of `bench.compile_stats` for every chip. Triton 3.6.0 needs a NumPy before
2.4 under its interpreter, gets one, and its warnings of that are ignored. A few bytes of spilled registers are counted,
but fail under the version of the committed table alone: other versions bring other assemblers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.options import parser
from bench.record import ROOT, Record

VERSIONS = {"3.6.0": ["numpy<2.4"], "3.7.1": [], "3.8.0": [], "3.9.0": []}
"""Versions of Triton, the last release of each minor one, and what they need beside it."""
HEADER = ["triton", "tests passed", "interpreted s", "variants compiled", "faults", "spilling", "compiled s"]
_NUMPY_WARNING = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"


def run(argv: list[str]) -> int:
    """Entry point; returns the exit status, 1 if a version fails."""
    options = _parse(argv)
    record = Record("matrix", argv)
    rows = []
    good = True
    for version in options.versions:
        with tempfile.TemporaryDirectory() as folder:
            found = _install(version, Path(folder))
            interpreted, interpret_seconds = _output(
                folder, "1", ["pytest", "-q", "-n", "2", "-W", _NUMPY_WARNING, "tests/interpret"]
            )
            compiled, compile_seconds = _output(folder, "0", ["bench.compile_stats"])
        tests = re.search(r"(\d+) passed(.*) in ", interpreted)
        variants = re.search(r"(\d+) compiled", compiled)
        spills = len(re.findall(r": spills: ", compiled))
        faults = len(re.findall(r" sm_\d+: ", compiled)) - spills
        passed = tests is not None and "failed" not in interpreted and "error" not in tests[2]
        passed &= variants is not None and faults == 0
        good &= record.target(f"triton {found}", passed, "passes" if passed else "fails")
        if not passed:
            print(interpreted[-3000:], compiled[-3000:], sep="\n", file=sys.stderr)
        row = [tests[1] if tests else "none", f"{interpret_seconds:.0f}", variants[1] if variants else "none"]
        rows.append([found, *row, str(faults), str(spills), f"{compile_seconds:.0f}"])
        record.figures[found] = dict(zip(HEADER[1:], rows[-1][1:], strict=True))
    record.table(HEADER, rows)
    record.write(options.results)
    return 0 if good else 1


def _parse(argv: list[str]) -> argparse.Namespace:
    made = parser("matrix", __doc__)
    made.add_argument("--versions", nargs="+", default=list(VERSIONS), metavar="VERSION", help="of Triton")
    return made.parse_args(argv)


def _install(version: str, folder: Path) -> str:
    """Install into a folder; returns the version that Python finds there."""
    wanted = [f"triton=={version}", *VERSIONS.get(version, [])]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *wanted]
    subprocess.run(pip, check=True)
    shown, _ = _output(str(folder), "0", ["bench.matrix"])
    return shown.strip()


def _output(folder: str, interpret: str, arguments: list[str]) -> tuple[str, float]:
    """What a module prints with a folder ahead of the installed packages, and the seconds it took."""
    env = os.environ | {
        "PYTHONPATH": folder,
        "TRITON_INTERPRET": interpret,
        "TRITON_CACHE_DIR": str(Path(folder) / "cache"),
    }
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    return done.stdout + done.stderr, time.perf_counter() - began


if __name__ == "__main__":
    import triton

    print(triton.__version__)
