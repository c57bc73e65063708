"""A StatefulDataLoader with a worker: a resume within an epoch, and behind it.

python examples/torchdata_loader.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torchdata.stateful_dataloader import StatefulDataLoader

from gpusampler import GPUBatchRebalanceSampler, microbatch_weight
from gpusampler.integrations.torchdata import resume

SLOTS = 2


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    """A batch padded to its longest sample."""
    return pad_sequence(samples, batch_first=True)


def train(state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Two epochs, or what is left of them; returns the loader's state from within the second one."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 200, (128,), generator=generator).tolist()
    dataset = [torch.randint(1, 32, (length,), generator=generator) for length in lengths]
    sampler = GPUBatchRebalanceSampler(lengths, effective_batch_size=32, grad_accum=SLOTS)
    loader = StatefulDataLoader(dataset, batch_sampler=sampler, collate_fn=pad, num_workers=1)
    saved: dict[str, Any] = {}
    for epoch in range(resume(loader, state) if state else 0, 2):
        sampler.set_epoch(epoch)
        batches, weights = iter(loader), []
        first = sampler.state_dict()["consumed"]  # known once the loader has restored it
        for number, batch in enumerate(batches, first):
            tokens_in_step = sum(lengths[i] for i in sampler.indices(number // SLOTS).tolist())
            weights.append(microbatch_weight(int((batch > 0).sum()), tokens_in_step, dp_size=1))
            if (epoch, number) == (1, 3):
                saved = loader.state_dict()
        # the weights of the micro-batches of a step add up to 1
        print(f"epoch {epoch} from micro-batch {first}: weights of {sum(weights):.3f} in {len(weights) // SLOTS} steps")
    return saved


def main() -> None:
    """Go through the data, then again from the state on."""
    train(train())


if __name__ == "__main__":
    main()
