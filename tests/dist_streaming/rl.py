"""Two ranks with different rollouts split them; each writes what it saw. Run by torchrun."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpusampler.errors import ParameterError
from gpusampler.group import end_without_gil
from gpusampler.rl import rearrange_micro_batches


def error_of(lengths: torch.Tensor, budget: int) -> str:
    try:
        rearrange_micro_batches({"rewards": lengths}, budget, lengths=lengths)
    except ParameterError as error:
        return str(error)
    return ""


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    lengths = torch.tensor([100] * 16 if rank == 0 else [400] + [10] * 15)
    batch = {"rewards": lengths.float()}
    alone, _ = rearrange_micro_batches(batch, 400, lengths=lengths, same_micro_num_in_dp=False)
    parts, rows = rearrange_micro_batches(batch, 400, lengths=lengths)
    met = torch.zeros(1)
    for _ in parts:
        one = torch.ones(1)
        dist.all_reduce(one)
        met += one
    seen: dict[str, Any] = {
        "alone": len(alone),
        "together": len(parts),
        "smallest": min(map(len, rows)),
        "largest": max(int(lengths[group].sum()) for group in rows),
        "met": int(met),
        "own error": error_of(lengths, 399),
        "too few rows": error_of(lengths[:2] if rank else lengths, 400),
    }
    groups = [dist.new_group([0]), dist.new_group([1])]
    end_without_gil(groups[rank])
    seen["subgroup"] = len(rearrange_micro_batches(batch, 400, groups[rank], lengths=lengths)[0])
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


main()
