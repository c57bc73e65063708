"""A loop with accelerate, its checkpoints, and a resume within an epoch.

python examples/accelerate_loop.py
torchrun --nproc-per-node=2 examples/accelerate_loop.py
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from gpusampler import GPUBatchRebalanceSampler, microbatch_weight
from gpusampler.integrations.accelerate import prepare

SLOTS = 2


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


def run(folder: str, resume: bool) -> None:
    """Two epochs, saved within the second; or what is left of them."""
    accelerator = Accelerator(gradient_accumulation_steps=SLOTS, cpu=not torch.cuda.is_available())
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 200, (128,), generator=generator).tolist()
    dataset = [torch.randint(1, 32, (length,), generator=generator) for length in lengths]
    sampler = GPUBatchRebalanceSampler(lengths, effective_batch_size=32, grad_accum=SLOTS)
    model = Model()
    model, optimizer, loader = prepare(
        accelerator,
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        DataLoader(dataset, batch_sampler=sampler, collate_fn=pad),
    )
    if resume:
        accelerator.load_state(folder)
    for epoch in range(sampler.epoch, 2):
        loader.set_epoch(epoch)
        first = sampler.state_dict()["consumed"]
        for number, batch in enumerate(loader, first):
            tokens_in_step = sum(lengths[i] for i in sampler.indices(number // SLOTS).tolist())
            weight = microbatch_weight(int((batch > 0).sum()), tokens_in_step, accelerator.num_processes, SLOTS)
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss * weight)
                optimizer.step()
                optimizer.zero_grad()
            if not resume and (epoch, number) == (1, 3):
                accelerator.save_state(folder)
        accelerator.print(f"epoch {epoch} from micro-batch {first}: loss {loss.item():.3f}")


def main() -> None:
    """Train, then train on from the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=not torch.cuda.is_available())
        shared = broadcast_object_list([folder])[0]
        run(shared, resume=False)
        accelerator.wait_for_everyone()
        run(shared, resume=True)
        accelerator.wait_for_everyone()
        accelerator.end_training()


if __name__ == "__main__":
    main()
