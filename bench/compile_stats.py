"""Compile every kernel ahead of time for every supported chip, without a GPU, and write what came out to a table.

    python -m bench.compile_stats            compare with the committed table; exit 1 on a difference
    python -m bench.compile_stats --write    write the table

A row is a kernel at block sizes that the launcher can produce, on one chip: registers a thread, stack and spills,
shared memory, instructions, and bytes of code, read from the cubin with the tools that come in Triton's wheel. The
table holds for one version of Triton, named in its first line, and is compared under that version alone.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpusampler.kernels import launch
from gpusampler.kernels.catalog import Variant, variants
from gpusampler.kernels.jit import FLAGS

TABLE = Path(__file__).parent / "results" / "compile_stats.csv"
CHIPS = tuple(launch.SHARED_BYTES)
REGISTERS = 65536
FORBIDDEN = re.compile(r"\b(fma\.\w+\.f32|fma\.\w+\.f64|div\.full\.\w+|div\.approx\S*|sqrt\.approx\S*)")
"""Float operations that no kernel may hold: they round otherwise than the CPU does."""


class Stats(NamedTuple):
    """One row of the table."""

    kernel: str
    variant: str
    chip: int
    warps: int
    registers: int
    stack: int
    local: int
    shared: int
    instructions: int
    code_bytes: int


def compile_ahead(variant: Variant, chip: int) -> Any:
    """What `triton.compile` makes of a variant for one chip."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(variant.function, variant.signature, variant.constants)
    options = {"num_warps": variant.num_warps, **FLAGS}
    return triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)


def compile_variant(variant: Variant, chip: int) -> tuple[Stats, str]:
    """Compile for one chip; returns its figures and its PTX."""
    compiled = compile_ahead(variant, chip)
    usage, code = read_cubin(compiled.asm["cubin"])
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s", code, re.M))
    figures = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    stats = Stats(
        variant.name,
        variant.label,
        chip,
        variant.num_warps,
        figures["REG"],
        figures["STACK"],
        figures["LOCAL"],
        compiled.metadata.shared,
        instructions,
        instructions * 16,
    )
    return stats, compiled.asm["ptx"]


def read_cubin(cubin: bytes) -> tuple[str, str]:
    """Resource usage and disassembly of a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True)
    return usage.stdout + usage.stderr, code.stdout


def faults(stats: Stats, ptx: str) -> list[str]:
    """What makes a compiled kernel unfit: empty if nothing does."""
    threads = stats.warps * 32
    limits = [
        (stats.stack > 0 or stats.local > 0, f"spills: stack {stats.stack}, local {stats.local}"),
        (stats.registers * threads > REGISTERS, f"{stats.registers} registers x {threads} threads"),
        (stats.shared > launch.SHARED_BYTES[stats.chip], f"{stats.shared} bytes of shared memory"),
        (threads > 1024, f"{threads} threads"),
    ]
    found = [text for wrong, text in limits if wrong]
    return found + sorted({f"float operation {name}" for name in FORBIDDEN.findall(ptx)})


def _measure(chip: int, number: int) -> tuple[Stats, list[str]]:
    """Compile the variant of this number: kernels themselves cannot be sent to another process."""
    stats, ptx = compile_variant(list(variants(chip))[number], chip)
    return stats, faults(stats, ptx)


def measure(chips: Iterable[int] = CHIPS, processes: int = 2) -> Iterator[tuple[Stats, list[str]]]:
    """Figures and faults of every variant on every chip, in the order of the table."""
    with ProcessPoolExecutor(processes) as pool:
        for chip in chips:
            yield from pool.map(partial(_measure, chip), range(len(list(variants(chip)))), chunksize=4)


def read_table(path: Path = TABLE) -> tuple[str, list[Stats]]:
    """The version of Triton that a table was made with, and its rows."""
    lines = path.read_text().splitlines()
    rows = [Stats(row[0], row[1], *map(int, row[2:])) for row in csv.reader(lines[2:])]
    return lines[0].removeprefix("# triton "), rows


def write_table(rows: Iterable[Stats], path: Path = TABLE) -> None:
    """Write rows, and the version of Triton that made them."""
    import triton

    with path.open("w", newline="") as file:
        file.write(f"# triton {triton.__version__}\n")
        writer: Any = csv.writer(file, lineterminator="\n")
        writer.writerow(Stats._fields)
        writer.writerows(rows)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.compile_stats", description="Compile every kernel, without a GPU.")
    parser.add_argument("--write", action="store_true", help="write the table rather than compare with it")
    write = parser.parse_args(argv).write
    version = importlib.metadata.version("triton")
    rows = []
    bad = 0
    for stats, found in measure():
        rows.append(stats)
        for text in found:
            bad += 1
            print(f"{stats.kernel} {stats.variant} sm_{stats.chip}: {text}", file=sys.stderr)
    if write:
        write_table(rows)
    elif read_table()[0] != version:
        print(f"not compared with the table, which is for triton {read_table()[0]}")
    else:
        known = set(read_table()[1])
        for stats in rows:
            if stats not in known:
                bad += 1
                print(f"not in the table: {stats}", file=sys.stderr)
    print(f"{len(rows)} compiled, {bad} faults")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
