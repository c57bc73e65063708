"""Make `tests/data/windows.npz` and `windows.json` from a folder of traces: `python -m bench.collect DIR`.

The folder holds one `NAME.npz` with an array `lengths` a trace, and `best_known.json`. The transformers sampler is run
on every window, which takes minutes; where `best_known.json` has its values, they must agree.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.exact import SYNCS, group_costs, lower_bound, step_cost
from bench.inputs import DATA, STORED, UNITS, cut, permuted_traces
from bench.peers import transformers_groups, transformers_version


def collect(folder: Path) -> None:
    """Write both files."""
    known = json.loads((folder / "best_known.json").read_text())["windows"]
    names = sorted({key.split("|")[0] for key in known})
    traces = {name: lengths for name, lengths in permuted_traces(folder).items() if name in names}
    cells = [(key, cell) for key, row in known.items() for cell in row]
    rows = [_row(key, cell, traces) for key, cell in tqdm(cells, desc="transformers sampler", unit="window")]
    DATA.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Any] = {name: lengths[:STORED].astype(np.uint16) for name, lengths in traces.items()}
    np.savez_compressed(DATA / "windows.npz", **stored)
    lines = ",\n".join(json.dumps(row) for row in rows)
    about = json.dumps("costs are unit * length + length**2 a sample, padded; best_known is for unit 10000, microbatch")
    peer = json.dumps(f"transformers {transformers_version()}")
    (DATA / "windows.json").write_text(f'{{"about": {about},\n"peer": {peer},\n"windows": [\n{lines}\n]}}\n')


def _row(key: str, cell: dict[str, Any], traces: dict[str, Any]) -> dict[str, Any]:
    trace, *sizes = key.split("|")
    size, dp_size, grad_accum = map(int, sizes)
    lengths = cut(traces[trace], size, cell["window"])
    if lower_bound(lengths, dp_size, UNITS[0]) != cell["lower_bound"]:
        raise SystemExit(f"{key} window {cell['window']}: these are other lengths than those of best_known.json")
    row = {"trace": trace, "B": size, "D": dp_size, "G": grad_accum, "window": cell["window"]}
    row |= {"best_known": cell["best_known"], "exact": cell["exact"]}
    for unit in UNITS:
        costs = group_costs(lengths, transformers_groups(lengths, dp_size, grad_accum, unit), unit)
        row |= {f"peer_{unit}_{sync}": step_cost(costs, dp_size, sync) for sync in SYNCS}
    for sync, field in zip(SYNCS, ("hf_same_cost", "hf_same_cost_step"), strict=True):
        if row[f"peer_{UNITS[0]}_{sync}"] != cell[field]:
            raise SystemExit(f"{key} window {cell['window']}: {field} is {cell[field]}, here {row}")
    return row


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
