"""Parts of the real runs: a dataset whose rows tell their index, a tiny model, the way to start several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

HERE = Path(__file__).parent
VOCABULARY = 16
LENGTHS = [2 + (7 * i * i + 3 * i) % 23 for i in range(48)]


class Rows(Dataset[dict[str, Any]]):
    """Row i: `LENGTHS[i]` tokens, of which the first two spell i."""

    def __init__(self, lengths: list[int] = LENGTHS) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        tokens = [1 + i // 14, 1 + i % 14, *(1 + (i * 5 + j * j) % 14 for j in range(2, self.lengths[i]))]
        return {"input_ids": tokens, "labels": tokens, "length": self.lengths[i]}


def rows_of(input_ids: torch.Tensor) -> list[int]:
    """Which rows a batch holds."""
    return [14 * (first - 1) + second - 1 for first, second in input_ids[:, :2].tolist()]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest; padding is no label."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.where(ids > 0, ids, -100)}


def collate_category(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad; one label a row."""
    batch = collate(rows)
    return {**batch, "labels": torch.tensor([sum(row["input_ids"]) % 3 for row in rows])}


class TokenModel(nn.Module):
    """Predicts each token from itself: the loss is a mean over the tokens of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.head = nn.Linear(8, VOCABULARY, dtype=torch.float64)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def full_gradient(model: nn.Module, rows: list[int], collate_fn: Any = collate) -> torch.Tensor:
    """Gradient of the mean over all the rows' items, by one process in one batch."""
    model.zero_grad()
    dataset = Rows()
    model(**collate_fn([dataset[i] for i in rows]))["loss"].backward()
    gradient = flat_gradient(model)
    model.zero_grad()
    return gradient


def flat_gradient(model: nn.Module) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def launch(
    script: str, folder: Path, *arguments: str, world: int = 2, timeout: int = 240, answers: bool = True
) -> list[dict[str, Any]]:
    """Run a script of this folder under torchrun; what each rank wrote with `answer`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [str(HERE / script), str(folder), *arguments]
    run_script(command, timeout)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world if answers else 0)]


def run_script(command: list[str], timeout: int = 240) -> str:
    """Run a command; its standard output. A failure shows what it said."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE.parent),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "1",
    }
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]
    return result.stdout


def answer(folder: str, rank: int, found: dict[str, Any]) -> None:
    """What a rank found."""
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def caught(make: Any) -> str:
    """Message of the ValueError that `make` raises, or nothing."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return ""
