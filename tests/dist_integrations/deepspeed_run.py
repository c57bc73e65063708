"""DeepSpeed on two processes: sizes from the sampler, one weighted step of ZeRO-2."""

from __future__ import annotations

import sys

import deepspeed
import torch
from dist_integrations.common import LENGTHS, Rows, TokenModel, answer, collate, full_gradient, rows_of
from torch.utils.data import DataLoader

from gpusampler import GPUBatchRebalanceSampler, microbatch_weight
from gpusampler.integrations.deepspeed import fill_config

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
}

if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    sampler = GPUBatchRebalanceSampler(LENGTHS, 12, grad_accum=2)
    step = sampler.indices(0).tolist()
    wanted = full_gradient(TokenModel(), step)
    model = TokenModel()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    config = fill_config(CONFIG, sampler)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    sizes = [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()]
    tokens = sum(LENGTHS[i] for i in step)
    rows = []
    for number, batch in enumerate(DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate)):
        rows += rows_of(batch["input_ids"])
        if number < 2:
            items = int((batch["labels"] != -100).sum())
            weight = microbatch_weight(items, tokens, dp_size=2, grad_accum=engine.gradient_accumulation_steps())
            engine.backward(engine(**batch)["loss"] * weight)
            engine.step()
    after = torch.cat([parameter.detach().flatten() for parameter in engine.module.parameters()])
    error = float((before - after - wanted).abs().max() / wanted.abs().max())
    answer(sys.argv[1], torch.distributed.get_rank(), {"sizes": sizes, "rows": rows, "error": error})
    torch.distributed.destroy_process_group()
