"""The Trainer: real runs of two processes, and what one process can show."""

from __future__ import annotations

import json
import types
from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch
from dist_integrations.common import LENGTHS, Rows, TokenModel, collate, launch, rows_of
from torch.utils.data import Dataset, IterableDataset
from transformers import BatchFeature, Trainer, TrainingArguments

from gpusampler import CostModel, GPUBatchRebalanceSampler
from gpusampler.integrations.transformers import balance

# the Trainer asks for pinned memory in its loaders, with or without a GPU
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")

COST = CostModel()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks of one run found."""
    return launch("trainer_run.py", tmp_path_factory.mktemp("trainer"))


@pytest.mark.dist
@pytest.mark.parametrize("loss", ["num_items", "mean", "ignores"])
def test_step_gradient_is_that_of_one_process(ranks: list[dict], loss: str):
    assert len({len(rows) for rank in ranks for rows in rank[loss]["rows"]}) > 1
    assert max(rank[loss]["error"] for rank in ranks) < 1e-6
    said = {"ignores": 1}.get(loss, 0)
    assert [len(rank[loss]["said"]) for rank in ranks] == [said, said]


@pytest.mark.dist
@pytest.mark.parametrize("loss", ["num_items tail", "mean tail", "ignores tail"])
def test_repeats_that_fill_up_the_last_step_count_nothing(ranks: list[dict], loss: str):
    rows = [row for rank in ranks for batch in rank[loss]["rows"] for row in batch]
    assert max(Counter(rows).values()) > 1
    assert max(rank[loss]["error"] for rank in ranks) < 1e-6


@pytest.mark.dist
def test_l01_l14_every_sample_once_an_epoch_and_other_steps_each_epoch(ranks: list[dict]):
    epochs = []
    for epoch in range(3):
        parts = [rank["runs"]["unbroken"][8 * epoch : 8 * epoch + 8] for rank in ranks]
        assert Counter(row for part in parts for rows in part for row in rows) == Counter(range(48))
        epochs.append([sorted(row for p in parts for row in p[i] + p[i + 1]) for i in range(0, 8, 2)])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    sampler = GPUBatchRebalanceSampler(LENGTHS, 12, seed=5)
    for epoch in range(3):
        assert epochs[epoch] == [sorted(sampler.indices(step, epoch).tolist()) for step in range(4)]


@pytest.mark.dist
def test_l43_l44_resume_in_the_second_epoch_with_workers_is_exact(ranks: list[dict]):
    for rank in ranks:
        assert rank["runs"]["resumed"] == rank["runs"]["unbroken"][12:]
        assert rank["runs"]["resumed weights"] == rank["runs"]["unbroken weights"]


@pytest.mark.dist
def test_what_the_trainer_decides_is_kept(ranks: list[dict]):
    assert [rank["batch"] for rank in ranks] == [[16, 2, 0], [16, 2, 1]]  # L20, world 2
    for rank in ranks:
        assert rank["runs"]["sync"] == "step"
        assert rank["runs"]["cost"]
        assert rank["runs"]["other seed"].startswith("seed was 5 when the state was saved and is 6 now")
        assert rank["tokens"].startswith("average_tokens_across_devices=False cannot be honoured")


def arguments(folder: Path, **options: object) -> TrainingArguments:
    defaults = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


class Recorder(Trainer):
    """Notes which rows each micro-batch holds."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.__dict__.setdefault("seen", []).append(rows_of(inputs["input_ids"]))
        return super().training_step(model, inputs, num_items_in_batch)


def recorder(folder: Path, dataset: object = None, model: torch.nn.Module | None = None, **options: object) -> Recorder:
    return Recorder(
        TokenModel() if model is None else model,
        arguments(folder, **options),
        train_dataset=Rows() if dataset is None else dataset,
        data_collator=collate,
    )


def sampler_of(trainer: Trainer) -> GPUBatchRebalanceSampler:
    return trainer.get_train_dataloader().batch_sampler


def test_l20_one_real_step_and_its_batch(tmp_path: Path):
    trainer = balance(recorder(tmp_path, max_steps=1), cost=COST)
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    assert [len(rows) for rows in trainer.seen] == [len(rows) for rows in list(sampler_of(trainer))[:2]]
    assert sum(map(len, trainer.seen)) == 6
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(("gpus", "batch"), [(2, 16), (1, 8)])
def test_l20_effective_batch_size(tmp_path: Path, gpus: int, batch: int):
    args = arguments(tmp_path, per_device_train_batch_size=4)
    args._setup_devices  # noqa: B018 - sets the number of GPUs, which this test then changes
    args._n_gpu = gpus
    trainer = balance(Trainer(TokenModel(), args, train_dataset=Rows(), data_collator=collate), cost=COST)
    loader = trainer.get_train_dataloader()
    assert isinstance(loader.batch_sampler, GPUBatchRebalanceSampler)
    assert loader.batch_sampler.effective_batch_size == batch
    assert loader.batch_sampler.dp_size == 1


def test_seeds_and_strategy_are_the_trainers(tmp_path: Path):
    assert sampler_of(balance(recorder(tmp_path, seed=7), cost=COST)).seed == 7
    assert sampler_of(balance(recorder(tmp_path, seed=7, data_seed=9), cost=COST)).seed == 9
    sequential = sampler_of(balance(recorder(tmp_path, train_sampling_strategy="sequential"), cost=COST))
    assert sorted(row for rows in list(sequential)[:2] for row in rows) == list(range(6))
    assert not sampler_of(balance(recorder(tmp_path), cost=COST)).drop_last
    assert sampler_of(balance(recorder(tmp_path, dataloader_drop_last=True), cost=COST)).drop_last


def as_columns(**more: list[object]) -> datasets.Dataset:
    rows = [Rows()[i] for i in range(48)]
    columns = {name: [row[name] for row in rows] for name in ("input_ids", "labels")}
    return datasets.Dataset.from_dict({**columns, **more})


def test_length_column_is_read_before_it_is_removed(tmp_path: Path):
    trainer = balance(recorder(tmp_path, as_columns(length=[100 + n for n in LENGTHS])), cost=COST)
    loader = trainer.get_train_dataloader()
    assert loader.dataset.column_names == ["input_ids", "labels"]
    assert loader.batch_sampler.lengths.values.tolist() == [100 + n for n in LENGTHS]


def test_length_column_may_have_another_name_and_the_dataset_a_format(tmp_path: Path):
    dataset = as_columns(tokens=[200 + n for n in LENGTHS]).with_format("torch")
    sampler = sampler_of(balance(recorder(tmp_path, dataset, length_column_name="tokens"), cost=COST))
    assert sampler.lengths.values.tolist() == [200 + n for n in LENGTHS]


def doubled(batch: dict) -> dict:
    return {name: [row * 2 for row in rows] for name, rows in batch.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d,
        lambda d: d.with_format("torch"),
        lambda d: d.select(range(47, -1, -1)),
        lambda d: d.with_transform(doubled),
    ],
)
def test_lengths_of_a_column_of_tokens(tmp_path: Path, change):
    dataset = change(as_columns())
    sampler = sampler_of(balance(recorder(tmp_path, dataset), cost=COST))
    assert sampler.lengths.values.tolist() == [len(dataset[i]["input_ids"]) for i in range(48)]


def test_lengths_that_count_nothing_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="lengths of 'length' are all 1"):
        sampler_of(balance(recorder(tmp_path, as_columns(length=[1] * 48)), cost=COST))


class Features(Dataset):
    """L26: items are a UserDict."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return BatchFeature({"input_ids": Rows()[i]["input_ids"], "labels": Rows()[i]["labels"]})


def test_l26_items_that_are_mappings_but_not_dicts(tmp_path: Path):
    assert sampler_of(balance(recorder(tmp_path, Features()), cost=COST)).lengths.values.tolist() == LENGTHS[:16]


def test_lengths_that_are_nowhere_are_asked_for(tmp_path: Path):
    trainer = balance(recorder(tmp_path, [{"pixels": 3}] * 8), cost=COST)
    with pytest.raises(
        ValueError, match=r"lengths must be given: the dataset has no 'length'.*no 'input_ids', got 'pixels'"
    ):
        trainer.get_train_dataloader()


def test_lengths_of_another_dataset_are_refused(tmp_path: Path):
    trainer = balance(recorder(tmp_path), lengths=LENGTHS[:40], cost=COST)
    with pytest.raises(ValueError, match="has 48 samples, but its sampler was given 40 lengths"):
        trainer.get_train_dataloader()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Rows())


@pytest.mark.parametrize(
    "dataset", [Stream(), as_columns().to_iterable_dataset(), as_columns().to_iterable_dataset(num_shards=2)]
)
def test_l25_an_iterable_dataset_is_refused(tmp_path: Path, dataset: object):
    trainer = recorder(tmp_path, dataset, max_steps=2)
    with pytest.raises(TypeError, match=r"train_dataset must be indexed and have a length.* IterableDataset"):
        balance(trainer, lengths=LENGTHS, cost=COST)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True cannot be honoured"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True cannot be honoured"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length' contradicts"),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path: Path, options: dict, name: str):
    trainer = recorder(tmp_path, **options)
    with pytest.raises(ValueError, match=name):
        balance(trainer, cost=COST)


def test_nonsense_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match=r"trainer must be a transformers\.Trainer"):
        balance(TokenModel())
    trainer = balance(recorder(tmp_path), cost=COST)
    with pytest.raises(ValueError, match="balanced already"):
        balance(trainer)
    model = TokenModel()
    model.config = types.SimpleNamespace(image_size=3)
    with pytest.raises(ValueError, match=r"cost must be given.*config must have one of hidden_size"):
        balance(recorder(tmp_path, model=model))


class Fragile(TokenModel):
    """Runs out of memory above two rows on average a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 3

    def forward(self, input_ids, labels, attention_mask=None):
        if len(input_ids) > self.limit:
            self.limit += 1
            raise RuntimeError("CUDA out of memory.")
        return super().forward(input_ids, labels, attention_mask)


def test_auto_find_batch_size_plans_anew(tmp_path: Path):
    trainer = balance(
        recorder(
            tmp_path, model=Fragile(), auto_find_batch_size=True, per_device_train_batch_size=8, num_train_epochs=1
        ),
        cost=COST,
    )
    trainer.train()
    size = trainer._train_batch_size
    assert size < 8
    assert trainer._balance_sampler.effective_batch_size == 2 * size
    last = trainer.seen[-len(trainer._balance_sampler) :]
    assert last == list(GPUBatchRebalanceSampler(LENGTHS, 2 * size, grad_accum=2, drop_last=False, cost=COST))
    assert Counter(row for rows in last for row in rows) == Counter(range(48))


def test_weights_do_not_touch_evaluation(tmp_path: Path):
    trainer = balance(
        Recorder(
            TokenModel(),
            arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=48),
            train_dataset=Rows(),
            eval_dataset=Rows(),
            data_collator=collate,
        ),
        cost=COST,
    )
    trainer.train()
    model = trainer.model.eval()
    wanted = model(**collate([Rows()[i] for i in range(48)]))["loss"].item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, abs=1e-6)


def test_own_count_of_items(tmp_path: Path):
    counted = []

    def count(inputs):
        counted.append(len(inputs["input_ids"]))
        return counted[-1]

    trainer = balance(recorder(tmp_path, max_steps=1), cost=COST, count_items=count)
    trainer.train()
    sizes = [len(rows) for rows in trainer.seen]
    assert counted == sizes + sizes  # for the total, then for each weight


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_l41_persistent_workers(tmp_path: Path, context: str):
    options = {"dataloader_persistent_workers": True, "dataloader_multiprocessing_context": context}
    trainer = balance(recorder(tmp_path, num_train_epochs=3, dataloader_num_workers=2, **options), cost=COST)
    trainer.train()
    sampler = GPUBatchRebalanceSampler(LENGTHS, 6, grad_accum=2, drop_last=False, cost=COST)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert trainer.seen[16 * epoch : 16 * (epoch + 1)] == list(sampler)


def test_l43_resume_anywhere(tmp_path: Path):
    options = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 4}
    unbroken = balance(recorder(tmp_path, **options), cost=COST)
    unbroken.train()
    for step in (4, 8, 16, 20):  # of 8 an epoch
        trainer = balance(recorder(tmp_path, **{**options, "save_strategy": "no"}), cost=COST)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert trainer.seen == unbroken.seen[2 * step :]


def test_resume_within_an_epoch_of_another_order_is_refused(tmp_path: Path):
    recorder(tmp_path, max_steps=3, save_strategy="steps", save_steps=3).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match="checkpoint within an epoch that was not balanced"):
        balance(recorder(tmp_path, max_steps=6), cost=COST).train(resume_from_checkpoint=checkpoint)
    free = balance(recorder(tmp_path, max_steps=6, ignore_data_skip=True), cost=COST)
    free.train(resume_from_checkpoint=checkpoint)
    assert free.seen == list(sampler_of(free))[:6]


def test_the_position_is_in_the_checkpoint(tmp_path: Path):
    balance(recorder(tmp_path, max_steps=10, save_strategy="steps", save_steps=5), cost=COST).train()
    state = json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())
    position = state["stateful_callbacks"]["BalancedPosition"]["attributes"]["position"]
    assert (position["epoch"], position["consumed"], position["grad_accum"]) == (1, 4, 2)
