"""accelerate on four processes in a mesh of two by two: tensor- or context-parallel peers share their micro-batches.

accelerate takes a ParallelismConfig only with GPUs; it is set here behind its check, everything after that is its own.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from dist_integrations.common import LENGTHS, Rows, answer, caught, collate, rows_of
from torch.utils.data import DataLoader

from gpusampler import GPUBatchRebalanceSampler
from gpusampler.integrations.accelerate import prepare


def rows(accelerator, plain, dp_size=2):
    sampler = GPUBatchRebalanceSampler(LENGTHS, 8, dp_size=dp_size, rank=0)
    loader = DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate)
    prepared = accelerator.prepare(loader) if plain else prepare(accelerator, loader)
    return [rows_of(batch["input_ids"]) for batch in prepared]


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    found = {}
    for peers in ("tp_size", "cp_size"):
        config = ParallelismConfig(dp_shard_size=2, **{peers: 2})
        accelerator.state.parallelism_config = config
        accelerator.state.device_mesh = config.build_device_mesh("cpu")
        for plain in (True, False):
            found[f"{peers} {plain}"] = rows(accelerator, plain)
            found[f"{peers} {plain} wrong"] = caught(lambda p=plain: rows(accelerator, p, dp_size=4))
    answer(sys.argv[1], accelerator.process_index, found)
    torch.distributed.destroy_process_group()
