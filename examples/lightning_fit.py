"""A Lightning Trainer with its defaults on balanced micro-batches.

python examples/lightning_fit.py            # one process
python examples/lightning_fit.py --devices 2
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from gpusampler import GPUBatchRebalanceSampler, microbatch_weight
from gpusampler.integrations.lightning import balanced_loader

SLOTS = 2


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    """A batch padded to its longest sample."""
    return pad_sequence(samples, batch_first=True)


class Model(LightningModule):
    """Predicts each token from itself."""

    def __init__(self) -> None:
        """Make the layers and the data."""
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(4, 200, (128,), generator=generator).tolist()
        self.samples = [torch.randint(1, 32, (length,), generator=generator) for length in self.lengths]

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Runs where the processes are, so that the sampler finds their number."""
        self.sampler = GPUBatchRebalanceSampler(self.lengths, effective_batch_size=32, grad_accum=SLOTS)
        return balanced_loader(DataLoader(self.samples, batch_sampler=self.sampler, collate_fn=pad), self.trainer)

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Mean loss over the micro-batch's tokens, weighted by its share of the step's."""
        tokens_in_step = sum(self.lengths[i] for i in self.sampler.indices(batch_idx // SLOTS).tolist())
        logits = self.head(self.embed(tokens))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0)
        return loss * microbatch_weight(int((tokens > 0).sum()), tokens_in_step, self.trainer.world_size, SLOTS)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train two epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    devices = parser.parse_args().devices
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="auto" if torch.cuda.is_available() else "cpu",
            devices=devices,
            accumulate_grad_batches=SLOTS,
            max_epochs=2,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(Model())
        print(f"trained {trainer.global_step} steps")


if __name__ == "__main__":
    main()
