"""The Trainer on several processes: coverage, epochs, resume, the step's gradient."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from dist_integrations.common import (
    LENGTHS,
    Rows,
    TokenModel,
    answer,
    caught,
    collate,
    collate_category,
    flat_gradient,
    full_gradient,
    rows_of,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from gpusampler import CostModel, GPUBatchRebalanceSampler
from gpusampler.integrations.transformers import balance


class Recorder(Trainer):
    """Notes which rows each micro-batch holds."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.__dict__.setdefault("seen", []).append(rows_of(inputs["input_ids"]))
        return super().training_step(model, inputs, num_items_in_batch)


class Gradients(TrainerCallback):
    """Keeps the gradient of the last step."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.last = flat_gradient(model).clone()


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, pad_token_id=0, **sizes)).double()


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=16, num_labels=3, **sizes, **dropout)).double()


def arguments(folder, **options):
    return TrainingArguments(
        folder,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        max_grad_norm=0.0,
        **options,
    )


def gradient(folder, model, collate_fn, tail=0):
    """Largest difference between a step's gradient and that of one process for the same 12 rows.

    With `tail` it is the step behind them, of so few rows that some are repeated to fill it up.
    """
    lengths = LENGTHS[: 12 + tail] if tail else LENGTHS
    rows = GPUBatchRebalanceSampler(lengths, 12, seed=42, drop_last=False).indices(1 if tail else 0).tolist()
    rows = rows[:tail] if tail else rows
    model.eval()
    wanted = full_gradient(model, rows, collate_fn)
    model.train()
    keep = Gradients()
    arguments_ = arguments(folder, max_steps=2 if tail else 1, learning_rate=0.0)
    cost = CostModel() if isinstance(model, TokenModel) else None
    trainer = Recorder(model, arguments_, train_dataset=Rows(lengths), data_collator=collate_fn, callbacks=[keep])
    trainer = balance(trainer, cost=cost)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(w.message) for w in caught_warnings if "num_items_in_batch" in str(w.message)]
    scale = float(wanted.abs().max())
    return {"error": float((keep.last - wanted).abs().max()) / scale, "said": said, "rows": trainer.seen}


def runs(folder, workers):
    """Three epochs unbroken, then resumed from the middle of the second."""
    options = {
        "num_train_epochs": 3,
        "dataloader_num_workers": workers,
        "dataloader_persistent_workers": True,
        "seed": 5,
    }
    found = {}
    for name, checkpoint in (("unbroken", None), ("resumed", str(Path(folder) / "checkpoint-6"))):
        settings = arguments(folder, **options)
        settings.set_save(strategy="steps", steps=3)
        trainer = balance(Recorder(llama(), settings, train_dataset=Rows(), data_collator=collate))
        trainer.train(resume_from_checkpoint=checkpoint)
        found[name] = trainer.seen
        found[f"{name} weights"] = float(sum(p.double().abs().sum() for p in trainer.model.parameters()))
        found["sync"] = trainer._balance_sampler.partition.sync
        found["cost"] = trainer._balance_sampler.partition.cost == CostModel.from_config(trainer.model.config)
    settings = arguments(folder, **{**options, "seed": 6})
    trainer = balance(Recorder(llama(), settings, train_dataset=Rows(), data_collator=collate))
    found["other seed"] = caught(lambda: trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-6")))
    return found


def batch_sizes(folder):
    """L20 on two processes."""
    settings = TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True, report_to=[]
    )
    loader = balance(Trainer(llama(), settings, train_dataset=Rows(), data_collator=collate)).get_train_dataloader()
    return [loader.batch_sampler.effective_batch_size, loader.batch_sampler.dp_size, loader.batch_sampler.rank]


if __name__ == "__main__":
    folder = sys.argv[1]
    found = {
        "num_items": gradient(folder, llama(), collate),
        "ignores": gradient(folder, bert(), collate_category),
        "mean": gradient(folder, TokenModel(), collate),
        "num_items tail": gradient(folder, llama(), collate, tail=3),
        "ignores tail": gradient(folder, bert(), collate_category, tail=1),
        "mean tail": gradient(folder, TokenModel(), collate, tail=1),
        "batch": batch_sizes(folder),
    }
    found["runs"] = runs(str(Path(folder) / "runs"), workers=2)
    found["tokens"] = caught(
        lambda: balance(Trainer(llama(), arguments(folder, average_tokens_across_devices=False), train_dataset=Rows()))
    )
    answer(folder, torch.distributed.get_rank(), found)
    torch.distributed.destroy_process_group()
