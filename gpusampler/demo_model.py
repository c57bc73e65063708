"""What the demo trains: a small decoder-only transformer, and sequences that it can learn.

The lengths are real, the tokens are not: a sequence counts up by a step of its own, so that the loss falls only as the
model learns to look back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

VOCABULARY = 256
IGNORED = -100
"""Target of what is padding: the loss passes over it."""


class TinyTransformer(nn.Module):
    """A decoder: embeddings, pre-norm blocks with causal attention, one score a vocabulary entry.

    Args:
        hidden_size: width, a multiple of `num_heads`.
        num_layers: blocks.
        num_heads: attention heads.
        longest: longest sequence.
    """

    def __init__(self, hidden_size: int, num_layers: int, num_heads: int, longest: int) -> None:
        """Initialise as torch does."""
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden_size)
        self.places = nn.Embedding(longest, hidden_size)
        self.blocks = nn.Sequential(*(_Block(hidden_size, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, [n, length, VOCABULARY], from tokens int64 [n, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.places(places))
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


class _Block(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.attention_out = nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden_size),
            nn.Linear(hidden_size, 4 * hidden_size),
            nn.GELU(),
            nn.Linear(4 * hidden_size, hidden_size),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        split = self.query_key_value(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).flatten(2))
        output: torch.Tensor = hidden + self.mlp(hidden)
        return output


class CountingData(Dataset[torch.Tensor]):
    """Sequences that count up by a step of their own, modulo the vocabulary, with some tokens replaced by noise."""

    def __init__(self, lengths: np.ndarray[Any, Any], seed: int) -> None:
        """Keep the lengths; a sequence is made when it is asked for, the same each time."""
        self.lengths = lengths
        self.seed = seed

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one sequence, int64 [length]."""
        random = np.random.default_rng((self.seed, index))
        first, step = random.integers(VOCABULARY), random.integers(1, 8)
        tokens = (first + step * np.arange(self.lengths[index])) % VOCABULARY
        noisy = random.random(len(tokens)) < 0.1
        tokens[noisy] = random.integers(VOCABULARY, size=noisy.sum())
        return torch.from_numpy(tokens)


def pad(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets int64 [n, longest]; what is padding, and the last token, has no target."""
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    targets = nn.utils.rnn.pad_sequence([each[1:] for each in sequences], batch_first=True, padding_value=IGNORED)
    return tokens, functional.pad(targets, (0, 1), value=IGNORED)
