"""Lightning: real runs of two processes with its defaults, and what one process can show."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from dist_integrations.common import HERE, LENGTHS, Rows, TokenModel, collate, launch, rows_of, run_script
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from gpusampler import GPUBatchRebalanceSampler
from gpusampler.integrations.lightning import balanced_loader

EVERY_ROW = Counter(range(48))

pytestmark = [
    # Lightning's tree helpers lag behind torch's
    pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\). is deprecated"),
    # the loaders of these tests are tiny, and have no workers on purpose
    pytest.mark.filterwarnings(r"ignore:The '\w+_dataloader' does not have many workers"),
    # says that it cannot set drop_last, which the loader checks
    pytest.mark.filterwarnings("ignore:You are using a custom batch sampler .* for prediction"),
]


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightning")
    launch("lightning_run.py", folder, "ddp", answers=False)
    return folder


def read(folder: Path, name: str) -> list:
    """What both ranks wrote."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


def check_fit_and_predict(folder: Path) -> None:
    parts = read(folder, "fit")
    for rank, part in enumerate(parts):
        sampler = GPUBatchRebalanceSampler(LENGTHS, 12, dp_size=2, grad_accum=2, rank=rank)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert part[8 * epoch : 8 * epoch + 8] == list(sampler)
    for epoch in range(3):
        assert Counter(r for part in parts for rows in part[8 * epoch : 8 * epoch + 8] for r in rows) == EVERY_ROW
    assert Counter(row for part in read(folder, "predict") for rows in part for row in rows) == EVERY_ROW
    assert max(read(folder, "gradient")) < 1e-12


@pytest.mark.dist
def test_l14_l31_fit_and_predict_with_the_defaults(by_torchrun: Path):
    check_fit_and_predict(by_torchrun)


@pytest.mark.dist
@pytest.mark.slow
def test_l31_processes_that_lightning_spawns(tmp_path: Path):
    run_script([sys.executable, str(HERE / "lightning_run.py"), str(tmp_path), "ddp_spawn"])
    check_fit_and_predict(tmp_path)


@pytest.mark.dist
def test_l43_l44_resume_within_an_epoch_with_workers(by_torchrun: Path):
    unbroken, resumed, after = (read(by_torchrun / name, "fit") for name in ("unbroken", "resumed", "next"))
    assert unbroken == read(by_torchrun, "fit")
    assert [part[12:] for part in unbroken] == resumed
    assert [part[8:] for part in unbroken] == after


@pytest.mark.dist
def test_l31_without_the_helper_the_error_says_what_to_set(by_torchrun: Path):
    for errors in read(by_torchrun, "errors"):
        assert errors["default"].startswith("use_distributed_sampler=True cannot be honoured")
        assert "balanced_loader(loader, trainer), or set use_distributed_sampler=False" in errors["default"]
        assert errors["predict"].startswith("drop_last=True would leave samples without a prediction")
        assert "dp_size of the sampler is 1, but Lightning runs 2 processes: give dp_size=2" in errors["dp_size"]
        assert "accumulate_grad_batches of the Trainer is 1 and grad_accum of the sampler is 2" in errors["accumulate"]


@pytest.mark.dist
def test_l31_l14_without_the_helper_what_the_error_says_works(by_torchrun: Path):
    check_fit_and_predict(by_torchrun / "plain")
    # at the end of an epoch it resumes, too
    assert read(by_torchrun / "plain" / "next", "fit") == [part[8:] for part in read(by_torchrun / "plain", "fit")]


class Model(LightningModule):
    """Notes which rows it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TokenModel()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.trainer.current_epoch, rows_of(batch["input_ids"])))
        return self.model(**batch)["loss"]

    def predict_step(self, batch, batch_idx):
        self.seen.append((0, rows_of(batch["input_ids"])))
        return torch.zeros(1)  # nothing would be a warning

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder: Path, **options: object) -> Trainer:
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(default_root_dir=folder, **{**defaults, **quiet, **options})


def loader(run: Trainer, workers: int = 0, loading: dict | None = None, **options: object) -> DataLoader:
    sampler = GPUBatchRebalanceSampler(LENGTHS, 12, **options)
    data = DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate, num_workers=workers, **(loading or {}))
    return balanced_loader(data, run)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks")
def test_l43_resume_at_the_end_of_an_epoch(tmp_path: Path, workers: int):
    model, run = Model(), trainer(tmp_path)
    run.fit(model, loader(run, workers))
    run.save_checkpoint(tmp_path / "end.ckpt")
    model, run = Model(), trainer(tmp_path, max_epochs=4)
    run.fit(model, loader(run, workers), ckpt_path=tmp_path / "end.ckpt")
    sampler = GPUBatchRebalanceSampler(LENGTHS, 12)
    assert [epoch for epoch, _ in model.seen] == [2] * 4 + [3] * 4
    for epoch in (2, 3):
        sampler.set_epoch(epoch)
        assert [rows for at, rows in model.seen if at == epoch] == list(sampler)


@pytest.mark.parametrize("length", [{}, {"max_epochs": -1, "max_steps": 12}])
@pytest.mark.parametrize("at", [{}, {"every_n_train_steps": 2}])
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks")
def test_l14_l43_resume_from_any_checkpoint_of_lightning(tmp_path: Path, at: dict, length: dict):
    def fit(checkpoint: Path | None = None) -> list:
        savers = [] if checkpoint else [ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{step}", **at)]
        options = {"max_epochs": 3, "callbacks": savers, "enable_checkpointing": not checkpoint, **length}
        model, run = Model(), trainer(tmp_path, **options)
        run.fit(model, loader(run), ckpt_path=checkpoint)
        return model.seen

    unbroken = fit()
    saved = [path for path in tmp_path.glob("step=*.ckpt") if path.stem != "step=12"]
    assert len(saved) == (5 if at else 2)
    for path in saved:
        assert fit(path) == unbroken[int(path.stem.split("=")[1]) :]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks")
def test_l14_without_the_helper_a_resume_at_the_end_of_an_epoch(tmp_path: Path, workers: int):
    def fit(checkpoint: Path | None = None) -> list:
        times = [] if checkpoint else [{}, {"every_n_train_steps": 4}]  # the latter before the epoch counts as over
        savers = [
            ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename=f"{{step}}-{at}", **options)
            for at, options in enumerate(times)
        ]
        model = Model()
        run = trainer(tmp_path, max_epochs=3, callbacks=savers, enable_checkpointing=not checkpoint)
        sampler = GPUBatchRebalanceSampler(LENGTHS, 12)
        data = DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate, num_workers=workers)
        run.fit(model, data, ckpt_path=checkpoint)
        return model.seen

    unbroken = fit()
    for name in ("step=4-0", "step=4-1", "step=8-0", "step=8-1"):
        assert fit(tmp_path / f"{name}.ckpt") == unbroken[int(name[5]) :]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_l41_persistent_workers(tmp_path: Path, context: str):
    model, run = Model(), trainer(tmp_path, max_epochs=3)
    run.fit(model, loader(run, 2, {"persistent_workers": True, "multiprocessing_context": context}))
    sampler = GPUBatchRebalanceSampler(LENGTHS, 12)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert [rows for at, rows in model.seen if at == epoch] == list(sampler)


def test_l31_predict_on_one_process_without_the_helper(tmp_path: Path):
    model, run = Model(), trainer(tmp_path)
    sampler = GPUBatchRebalanceSampler(LENGTHS, 13, grad_accum=2, drop_last=False)
    run.predict(model, DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate))
    assert [rows for _, rows in model.seen] == list(sampler)


def test_a_loader_from_the_hook_of_the_module(tmp_path: Path):
    class Own(Model):
        def train_dataloader(self):
            return loader(self.trainer)

    model, run = Own(), trainer(tmp_path)
    run.fit(model)
    assert Counter(row for epoch, rows in model.seen for row in rows if epoch == 0) == EVERY_ROW
    assert model.seen[:4] != model.seen[4:]


def test_what_cannot_be_honoured_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="overfit_batches=2 cannot be honoured"):
        loader(trainer(tmp_path, overfit_batches=2))
    with pytest.raises(ValueError, match="accumulate_grad_batches of the Trainer is 3 and grad_accum"):
        loader(trainer(tmp_path, accumulate_grad_batches=3))
    with pytest.raises(TypeError, match="trainer must be a Lightning Trainer"):
        loader(object())
    with pytest.raises(ValueError, match="must have a GPUBatchRebalanceSampler as its batch_sampler, got BatchSampler"):
        balanced_loader(DataLoader(Rows()), trainer(tmp_path))
    run = trainer(tmp_path)
    with pytest.raises(ValueError, match="drop_last=True would leave samples without a prediction"):
        run.predict(Model(), loader(run))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Rows())


def test_l25_an_iterable_dataset_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="IterableDataset"):
        balanced_loader(DataLoader(Stream(), batch_sampler=GPUBatchRebalanceSampler(LENGTHS, 12)), trainer(tmp_path))
    with pytest.raises(ValueError, match="must have a GPUBatchRebalanceSampler"):
        balanced_loader(DataLoader(Stream()), trainer(tmp_path))
