"""DistributedDataParallel with gradient accumulation under `no_sync`, and an exact gradient.

    torchrun --nproc-per-node=2 examples/ddp_no_sync.py

Ranks wait for each other once a step, so that the sampler balances the sums of their micro-batches (sync="step").
Each micro-batch's mean loss is weighted by its share of the step's tokens: the gradient is that of the mean over all
of them. It trains three epochs, then goes on from a checkpoint taken within the last one, to the same loss.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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


def train(device: torch.device, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Three epochs, or what is left of them; returns a checkpoint from within the last one."""
    world, slots = dist.get_world_size(), 2
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 200, (256,), generator=generator).tolist()
    dataset = [torch.randint(1, 32, (length,), generator=generator) for length in lengths]

    sampler = GPUBatchRebalanceSampler(lengths, effective_batch_size=64, grad_accum=slots, sync="step")
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
    model = DistributedDataParallel(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
    saved: dict[str, Any] = {}
    for epoch in range(sampler.epoch, 3):
        sampler.set_epoch(epoch)
        first = sampler.state_dict()["consumed"]  # 0, but after a resume
        for number, batch in enumerate(loader, first):
            step, slot = divmod(number, slots)
            tokens_in_step = sum(lengths[i] for i in sampler.indices(step).tolist())
            last = slot == slots - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(batch.to(device))
                (loss * microbatch_weight(int((batch > 0).sum()), tokens_in_step, dp_size=world)).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            if last and (epoch, step) == (2, 1):
                parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
                saved = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        if dist.get_rank() == 0:
            print(f"epoch {epoch} from micro-batch {first}: loss {loss.item():.6f}")
    return saved


def main() -> None:
    """Train, then train on from the checkpoint."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    saved = train(device)
    train(device, saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
