"""FSDP2 (`fully_shard`) with gradient accumulation, and an exact gradient.

    torchrun --nproc-per-node=2 examples/fsdp2.py

FSDP gathers parameters for every micro-batch, so that ranks wait for each other in every slot, with or without gradient
synchronisation: the sampler balances each slot (sync="microbatch", the default). Each micro-batch's mean loss is
weighted by its share of the step's tokens: the gradient is that of the mean over all of them. On CPUs FSDP2 needs
torch 2.7.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from gpusampler import GPUBatchRebalanceSampler, microbatch_weight


class Model(nn.Module):
    """Predicts each token from itself."""

    def __init__(self) -> None:
        """Start from the same weights on every rank."""
        super().__init__()
        torch.manual_seed(0)
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
    """Train three epochs."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    world, slots = dist.get_world_size(), 2
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 200, (256,), generator=generator).tolist()
    dataset = [torch.randint(1, 32, (length,), generator=generator) for length in lengths]

    sampler = GPUBatchRebalanceSampler(lengths, effective_batch_size=64, grad_accum=slots)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
    model = Model().to(device)
    fully_shard(model.head)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, sampler.state_dict()["consumed"]):  # 0, but after a resume
            step, slot = divmod(number, slots)
            tokens_in_step = sum(lengths[i] for i in sampler.indices(step).tolist())
            last = slot == slots - 1
            model.set_requires_gradient_sync(last)
            loss = model(batch.to(device))
            (loss * microbatch_weight(int((batch > 0).sum()), tokens_in_step, dp_size=world)).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
