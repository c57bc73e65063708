"""A DeepSpeed engine whose configuration is filled in from the sampler; without DeepSpeed, the configuration.

torchrun --nproc-per-node=2 examples/deepspeed_config.py
python examples/deepspeed_config.py                       # the configuration, where DeepSpeed is not installed
"""

from __future__ import annotations

import importlib.util
import json

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from gpusampler import GPUBatchRebalanceSampler, microbatch_weight
from gpusampler.integrations.deepspeed import fill_config

SLOTS = 2
CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


class Model(nn.Module):
    """Predicts each token from itself."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss over the tokens; 0 is padding."""
        logits = self.head(self.embed(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0)


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    """A batch padded to its longest sample."""
    return pad_sequence(samples, batch_first=True)


def main() -> None:
    """Train one epoch, or show the configuration."""
    installed = importlib.util.find_spec("deepspeed") is not None
    if installed:
        import deepspeed

        deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")  # the sampler asks for the rank
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 200, (128,), generator=generator).tolist()
    dataset = [torch.randint(1, 32, (length,), generator=generator) for length in lengths]
    sampler = GPUBatchRebalanceSampler(lengths, effective_batch_size=32, grad_accum=SLOTS)
    config = fill_config(CONFIG, sampler)
    print(json.dumps(config))
    if not installed:
        return

    model = Model()
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    for number, batch in enumerate(DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)):
        tokens_in_step = sum(lengths[i] for i in sampler.indices(number // SLOTS).tolist())
        weight = microbatch_weight(int((batch > 0).sum()), tokens_in_step, sampler.dp_size, SLOTS)
        loss = engine(batch.to(engine.device))
        engine.backward(loss * weight)  # the engine divides by SLOTS
        engine.step()
    print(f"loss {loss.item():.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
