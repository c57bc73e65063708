"""Two ranks with different rollouts split them; each writes what it saw. Run by torchrun."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpusampler.errors import DistributedError, ParameterError
from gpusampler.group import end_without_gil
from gpusampler.rl import rearrange_micro_batches


def error_of(lengths: torch.Tensor, budget: Any, **options: Any) -> str:
    try:
        rearrange_micro_batches({"rewards": lengths}, budget, lengths=lengths, **options)
    except (ParameterError, DistributedError) as error:
        return f"{type(error).__name__}: {error}"
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
    wrong: dict[str, Any] = {
        "max_token_len": 0,
        "num_batches_divided_by": 2**70,
        "min_num_micro_batch": 2**70,
        "same_micro_num_in_dp": None,
        "use_dynamic_bsz_balance": 1,
        "cost": 3,
    }
    seen["one rank's parameter"] = {}
    for name, value in wrong.items():
        options = {"max_token_len": 400} | ({name: value} if rank == 1 else {})
        seen["one rank's parameter"][name] = error_of(lengths, options.pop("max_token_len"), **options)
    seen["other multiples"] = error_of(lengths, 400, num_batches_divided_by=2 + rank)
    seen["after errors"] = len(rearrange_micro_batches(batch, 400, lengths=lengths)[0])
    groups = [dist.new_group([0]), dist.new_group([1])]
    end_without_gil(groups[rank])
    seen["subgroup"] = len(rearrange_micro_batches(batch, 400, groups[rank], lengths=lengths)[0])
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    end_without_gil(pair)
    alike = {"dp_group": pair, "same_micro_num_in_dp": rank == 0}
    seen["alone on one rank"] = error_of(lengths, 400, **alike)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


main()
