"""A carried walk under the balancing sampler: uneven micro-batches, `no_sync`, an epoch that breaks off, and a resume.

    torchrun --nproc-per-node=2 examples/carry.py

The student predicts the clean clip from a noisy one on four rungs, and is trained on the states that it reaches itself.
A full walk would cost it four forwards a micro-batch; the carry costs one. It is updated at every second optimizer
step; in between, a method of two models would train the other one on `step.pred`.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from gpusampler import GPUBatchRebalanceSampler
from gpusampler.carry import CarryLoop, CarryStep, sde_renoise, stagger_rank_and_groups

GRID = [1.0, 0.75, 0.5, 0.25]
SLOTS, INTERVAL = 2, 2


class Clips(Dataset):
    """Clips of four channels; each comes with its id."""

    def __init__(self, lengths: list[int]) -> None:
        """Draw them."""
        generator = torch.Generator().manual_seed(1)
        self.clips = [torch.randn(4, generator=generator).expand(length, 4) for length in lengths]

    def __len__(self) -> int:
        """How many there are."""
        return len(self.clips)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        """The id and the clip."""
        return index, self.clips[index]


def collate(samples: list[tuple[int, torch.Tensor]]) -> dict[str, object]:
    """Ids, and clips padded to the longest."""
    ids, clips = zip(*samples, strict=True)
    return {"ids": ids, "clips": pad_sequence(clips, batch_first=True), "lengths": torch.tensor([*map(len, clips)])}


class Student(nn.Module):
    """The clean clip from a noisy one, its noise level and its first frame."""

    def __init__(self) -> None:
        """Start from the same weights on every rank."""
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(9, 64), nn.SiLU(), nn.Linear(64, 4))

    def forward(self, state: torch.Tensor, timestep: float, batch: dict) -> torch.Tensor:
        """Frames are denoised one by one."""
        first = batch["clips"][:, :1].expand_as(state)
        return self.net(torch.cat([state, first, torch.full_like(state[..., :1], timestep)], dim=-1))


def loss_of(step: CarryStep) -> torch.Tensor:
    """Mean over the frames of the carried batch, which is not the batch that the loader gave in this call."""
    clips, lengths = step.raw_batch["clips"], step.raw_batch["lengths"]
    is_frame = torch.arange(clips.shape[1], device=clips.device) < lengths[:, None]
    return (step.pred - clips).square().mean(-1)[is_frame].mean()


class Trainer:
    """All that a run consists of, so that it can be made anew for the resume."""

    def __init__(self, device: torch.device) -> None:
        """Build it from scratch."""
        lengths = torch.randint(4, 80, (128,), generator=torch.Generator().manual_seed(0)).tolist()
        self.sampler = GPUBatchRebalanceSampler(lengths, effective_batch_size=16, grad_accum=SLOTS, sync="step")
        self.loader = DataLoader(Clips(lengths), batch_sampler=self.sampler, collate_fn=collate)
        self.student = DistributedDataParallel(Student().to(device))
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-2)
        rank, groups = stagger_rank_and_groups()
        generator = torch.Generator(device).manual_seed(rank)
        self.loop = CarryLoop(
            self.student,
            GRID,
            start=lambda batch: torch.randn(batch["clips"].shape, generator=generator, device=device),
            renoise=sde_renoise(generator=generator),
            num_slots=SLOTS,
            stagger_rank=rank,
            stagger_groups=groups,
            interval=INTERVAL,
            device=device,
        )
        self.steps = 0

    def epoch(self, epoch: int, stop: int | None = None) -> None:
        """Train an epoch, or its first `stop` micro-batches."""
        self.sampler.set_epoch(epoch)
        start = self.sampler.state_dict()["consumed"]  # 0, but after a resume
        self.loop.align(start % SLOTS)  # the epoch before may have broken off in mid-step
        self.optimizer.zero_grad()
        sizes = set()
        for number, batch in enumerate(self.loader, start):
            slot, is_update = number % SLOTS, self.steps % INTERVAL == 0
            last = slot == SLOTS - 1
            with contextlib.nullcontext() if last else self.student.no_sync(), torch.set_grad_enabled(is_update):
                step = self.loop.step(batch, slot=slot, sample_ids=batch["ids"])
                loss = loss_of(step)
                if is_update:
                    (loss / SLOTS).backward()
            sizes.add(len(step.sample_ids))
            if last:
                self.steps += 1
                if is_update:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            if number + 1 == stop:
                break
        self.say(f"epoch {epoch}: micro-batches of {min(sizes)} to {max(sizes)} clips, loss {loss.item():.3f}")

    def say(self, text: str) -> None:
        """Print on the first rank, with the forwards that every rank has run."""
        forwards = [0] * dist.get_world_size()
        dist.all_gather_object(forwards, self.loop.forwards)
        if dist.get_rank() == 0:
            print(f"{text}, forwards of the ranks {forwards}")

    def save(self) -> dict:
        """What a checkpoint holds: nothing of the carry."""
        return {
            "student": self.student.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state_dict(),
            "steps": self.steps,
        }

    def load(self, state: dict) -> None:
        """Go on from a checkpoint: trajectories start from fresh noise, on the rungs where their streams would be."""
        self.student.load_state_dict(state["student"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        self.steps = state["steps"]
        self.loop.restart(self.steps * SLOTS + self.sampler.state_dict()["consumed"] % SLOTS)


def main() -> None:
    """Train three epochs, of which the second breaks off, and the third in two parts."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    trainer = Trainer(device)
    trainer.epoch(0)
    trainer.epoch(1, stop=5)
    trainer.epoch(2, stop=6)
    state = trainer.save()
    trainer = Trainer(device)
    trainer.load(state)
    trainer.epoch(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
