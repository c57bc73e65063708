"""transformers.Trainer on balanced micro-batches: one line.

python examples/trainer.py
torchrun --nproc-per-node=2 examples/trainer.py
"""

from __future__ import annotations

import tempfile

import datasets
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gpusampler.integrations.transformers import balance


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch padded to its longest row; padding is no label."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.where(ids > 0, ids, -100)}


def main() -> None:
    """Train one epoch of a tiny model."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 100, (64,), generator=generator).tolist()
    rows = [torch.randint(1, 32, (length,), generator=generator).tolist() for length in lengths]
    dataset = datasets.Dataset.from_dict({"input_ids": rows, "length": lengths})
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = balance(Trainer(model, arguments, train_dataset=dataset, data_collator=collate))
        trainer.train()
        if trainer.is_world_process_zero():
            print(trainer.get_train_dataloader().batch_sampler.partition)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
