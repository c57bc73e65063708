"""Lightning on two processes: by torchrun (`ddp`) or started by Lightning (`ddp_spawn`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from dist_integrations.common import LENGTHS, Rows, TokenModel, caught, collate, flat_gradient, full_gradient, rows_of
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from gpusampler import GPUBatchRebalanceSampler, microbatch_weight
from gpusampler.integrations.lightning import balanced_loader


class Model(LightningModule):
    """Weights its losses, and notes which rows it sees."""

    def __init__(self, folder="", batch=12):
        super().__init__()
        self.model = TokenModel()
        self.folder, self.batch = folder, batch
        self.seen, self.first = [], None

    def training_step(self, batch, batch_idx):
        self.seen.append(rows_of(batch["input_ids"]))
        step = self.trainer.global_step % (48 // self.batch)
        epoch = self.trainer.current_epoch
        sampler = GPUBatchRebalanceSampler(LENGTHS, self.batch)
        tokens = sum(LENGTHS[i] for i in sampler.indices(step, epoch).tolist())
        items = int((batch["labels"] != -100).sum())
        return self.model(**batch)["loss"] * microbatch_weight(items, tokens, self.trainer.world_size, grad_accum=2)

    def on_before_optimizer_step(self, optimizer):
        if self.first is None:
            self.first = flat_gradient(self.model).clone()

    def predict_step(self, batch, batch_idx):
        self.seen.append(rows_of(batch["input_ids"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def write(self, name):
        (Path(self.folder) / f"{name}-{self.trainer.global_rank}.json").write_text(json.dumps(self.seen))
        self.seen = []

    def on_train_end(self):
        self.write("fit")
        if self.first is not None:
            wanted = full_gradient(TokenModel(), GPUBatchRebalanceSampler(LENGTHS, self.batch).indices(0).tolist())
            error = float((self.first - wanted).abs().max())
            (Path(self.folder) / f"gradient-{self.trainer.global_rank}.json").write_text(json.dumps(error))

    def on_predict_end(self):
        self.write("predict")


def trainer(folder, strategy, **options):
    settings = {"accelerator": "cpu", "devices": 2, "max_epochs": 3, "accumulate_grad_batches": 2, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(default_root_dir=folder, strategy=strategy, **{**settings, **quiet, **options})


def plain(drop_last=False):
    sampler = GPUBatchRebalanceSampler(LENGTHS, 12, dp_size=2, grad_accum=2, drop_last=drop_last)
    return DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate)


def loader(run, batch=12, workers=0, **options):
    sampler = GPUBatchRebalanceSampler(LENGTHS, batch, dp_size=2, grad_accum=2, drop_last=False, **options)
    return balanced_loader(DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate, num_workers=workers), run)


def without_helper(folder, strategy):
    """What Lightning does with a loader as it is: its default refused by name, then as the error says."""
    Path(folder, "plain").mkdir(exist_ok=True)
    run = trainer(folder, strategy, enable_checkpointing=False)
    errors = {"default": caught(lambda: run.fit(Model(f"{folder}/plain"), plain()))}
    errors["predict"] = caught(lambda: run.predict(Model(f"{folder}/plain"), plain(drop_last=True)))
    run.predict(Model(f"{folder}/plain"), plain())
    ends = ModelCheckpoint(dirpath=f"{folder}/plain", save_top_k=-1, filename="{epoch}")
    for name, checkpoint in (("plain", None), ("plain/next", f"{folder}/plain/epoch=0.ckpt")):
        Path(folder, name).mkdir(exist_ok=True)
        run = trainer(folder, strategy, callbacks=[] if checkpoint else [ends], use_distributed_sampler=False)
        run.fit(Model(f"{folder}/{name}"), plain(), ckpt_path=checkpoint)
        torch.distributed.barrier()
    return errors


if __name__ == "__main__":
    folder, strategy = sys.argv[1:]
    run = trainer(folder, strategy, enable_checkpointing=False)
    run.fit(Model(folder), loader(run))
    run.predict(Model(folder), loader(run))
    if strategy == "ddp_spawn":
        sys.exit()
    saver = ModelCheckpoint(dirpath=f"{folder}/saved", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    ends = ModelCheckpoint(dirpath=f"{folder}/saved", save_top_k=-1, filename="{epoch}")
    for name, checkpoint in (("unbroken", ""), ("resumed", "step=6.ckpt"), ("next", "epoch=0.ckpt")):
        checkpoint = checkpoint and f"{folder}/saved/{checkpoint}"
        run = trainer(folder, strategy, callbacks=[] if checkpoint else [saver, ends])
        Path(folder, name).mkdir(exist_ok=True)
        run.fit(Model(f"{folder}/{name}"), loader(run, workers=2), ckpt_path=checkpoint or None)
        torch.distributed.barrier()
    errors = {"accumulate": caught(lambda: loader(trainer(folder, strategy, accumulate_grad_batches=1)))}
    run = trainer(folder, strategy, enable_checkpointing=False)
    alone = GPUBatchRebalanceSampler(LENGTHS, 12, dp_size=1, grad_accum=2, rank=0)
    data = balanced_loader(DataLoader(Rows(), batch_sampler=alone), run)
    errors["dp_size"] = caught(lambda: run.fit(Model(folder), data))
    errors |= without_helper(folder, strategy)
    Path(folder, f"errors-{run.global_rank}.json").write_text(json.dumps(errors))
