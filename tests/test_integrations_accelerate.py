"""accelerate: real runs of two processes, and what one process can show."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from dist_integrations.common import LENGTHS, Rows, collate, launch, rows_of
from torch.utils.data import DataLoader, IterableDataset

from gpusampler import GPUBatchRebalanceSampler
from gpusampler.integrations.accelerate import prepare, prepare_loader

RANKS = range(2)
LOADERS = ["plain", "fork", "spawn", "counted", "own prepare", "own prepare, fork", "own prepare, counted"]
PREPARED = ["", " own prepare"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks of one run found."""
    return launch("accelerate_run.py", tmp_path_factory.mktemp("accelerate"))


def bare(rank: int, epoch: int) -> list[list[int]]:
    """What the sampler alone yields."""
    sampler = GPUBatchRebalanceSampler(LENGTHS, 8, dp_size=2, grad_accum=2, rank=rank)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.dist
@pytest.mark.parametrize("how", ["ours", "plain"])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("even", [True, False])
def test_l01_prepare_does_not_cut_the_plan(ranks: list[dict], how: str, drop_last: bool, even: bool):
    found = [rank["small"][f"{how} {drop_last} {even}"] for rank in ranks]
    assert [part["len"] for part in found] == [[2, 2], [2, 2]]
    rows = [row for part in found for batch in part["rows"] for row in batch]
    assert sorted(rows) == list(range(16))
    sampler = GPUBatchRebalanceSampler(range(10, 26), 8, dp_size=2, rank=1, drop_last=drop_last)
    assert found[1]["rows"] == list(sampler)


@pytest.mark.dist
def test_l01_a_loader_that_is_cut_says_what_to_use(ranks: list[dict]):
    for rank in ranks:
        assert "BatchSamplerShard would keep one of 2" in rank["refused"]["shard"]
        assert "gpusampler.integrations.accelerate.prepare" in rank["refused"]["shard"]


@pytest.mark.dist
def test_gather_for_metrics_of_a_plain_prepare_keeps_the_last_micro_batches(ranks: list[dict]):
    for rank in ranks:
        assert sorted(rank["gathered"]) == list(range(15))


@pytest.mark.dist
@pytest.mark.parametrize("loader", LOADERS)
def test_l14_l41_every_epoch_reaches_the_sampler(ranks: list[dict], loader: str):
    for rank in RANKS:
        epochs = ranks[rank]["epochs"][loader]
        assert epochs == [bare(rank, epoch) for epoch in range(3)]
    for epoch in range(3):
        rows = [row for rank in ranks for batch in rank["epochs"][loader][epoch] for row in batch]
        assert sorted(rows) == list(range(48))
    sets = [{frozenset(batch) for batch in epoch} for epoch in ranks[0]["epochs"][loader]]
    assert sets[0] != sets[1] != sets[2] != sets[0]


@pytest.mark.dist
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", ["load", "skip", "both"])
@pytest.mark.parametrize("prepared", PREPARED)
def test_l43_resume_in_a_later_epoch(ranks: list[dict], way: str, workers: int, prepared: str):
    for rank in RANKS:
        found = ranks[rank][f"resume {workers}{prepared}"]
        assert found[way] == bare(rank, 1)[3:]
        assert found[f"{way} next"] == bare(rank, 2)


@pytest.mark.dist
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prepared", PREPARED)
def test_l44_batches_held_by_the_loaders_are_not_consumed(ranks: list[dict], workers: int, prepared: str):
    for rank in ranks:
        found = rank[f"resume {workers}{prepared}"]
        assert found["consumed"] == 3
        assert [found[f"{way} consumed"] for way in ("load", "skip", "both")] == [4, 4, 4]


@pytest.mark.dist
def test_a_finished_epoch_is_followed_by_the_next(ranks: list[dict]):
    assert [rank["finished"] for rank in ranks] == [bare(rank, 1) for rank in RANKS]


@pytest.mark.dist
@pytest.mark.parametrize("name", ["ours", "own prepare"])
def test_l43_resume_where_accelerate_uses_a_stateful_loader(ranks: list[dict], name: str):
    for rank in RANKS:
        assert ranks[rank]["stateful"][name] == bare(rank, 1)[3:]


@pytest.mark.dist
def test_l43_a_stateful_loader_that_keeps_no_epoch_is_a_warning(ranks: list[dict]):
    for rank in ranks:
        (said,) = rank["stateful"]["said"]
        assert said.startswith(
            "use_stateful_dataloader=True: behind accelerate's own prepare the loader keeps a number"
        )


@pytest.mark.dist
def test_l43_a_loaded_position_is_not_forgotten_without_a_word(ranks: list[dict]):
    for rank in ranks:
        assert len(rank["forgotten"]) == 1
        assert rank["forgotten"][0].startswith("set_epoch(0) forgets the position that was loaded in epoch 1")


@pytest.mark.dist
@pytest.mark.slow
def test_tensor_and_context_parallel_peers_get_the_same_rows(tmp_path: Path):
    found = launch("mesh_run.py", tmp_path, world=4)
    for peers in ("tp_size", "cp_size"):
        for plain in (True, False):
            for process in range(4):
                sampler = GPUBatchRebalanceSampler(LENGTHS, 8, dp_size=2, rank=process // 2)
                assert found[process][f"{peers} {plain}"] == list(sampler)
                assert "dp_size of the sampler is 4" in found[process][f"{peers} {plain} wrong"]


@pytest.mark.dist
def test_weighted_gradient_under_accumulate_is_exact(ranks: list[dict]):
    assert max(rank["gradient"] for rank in ranks) < 1e-12


@pytest.mark.dist
def test_what_cannot_be_honoured_is_named(ranks: list[dict]):
    for rank in ranks:
        for name in ("dispatch_batches", "split_batches"):
            assert rank["refused"][f"{name} False"].startswith(f"{name}=True cannot be honoured")
            assert name in rank["refused"][f"{name} True"]
        assert "is 1 and grad_accum of the sampler is 2" in rank["refused"]["gradient_accumulation_steps"]
        for name in ("dp_size", "dp_size plain"):
            assert "dp_size of the sampler is 1, but accelerate runs 2 processes" in rank["refused"][name]
        assert rank["refused"]["stream"].endswith("for all 2 processes: do not prepare its loader")
        assert rank["refused"]["objects"].startswith("objects must hold a DataLoader")


def loader(**options: object) -> DataLoader:
    sampler = GPUBatchRebalanceSampler(LENGTHS, 8, grad_accum=2)
    return DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate, **options)


def test_other_objects_are_prepared_as_always():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared_model, prepared_loader, prepared_optimizer = prepare(accelerator, model, loader(), optimizer)
    assert prepared_model is model
    assert type(prepared_optimizer).__name__ == "AcceleratedOptimizer"
    assert accelerator.prepare(prepared_loader) is prepared_loader


def test_gather_for_metrics_keeps_the_last_micro_batch_whole():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rows = [
        i
        for batch in prepare(accelerator, loader())
        for i in rows_of(accelerator.gather_for_metrics(batch)["input_ids"])
    ]
    assert Counter(rows) == Counter(range(48))


def test_l43_skipping_takes_no_plans():
    sampler = GPUBatchRebalanceSampler(LENGTHS, 8, grad_accum=2, plan_ahead=1)
    data = DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate)
    prepared = prepare_loader(Accelerator(cpu=True), data)
    planned, original = [], sampler._plan_chunk

    def plan(*place, **options):
        planned.append(place[:2])
        return original(*place, **options)

    sampler._plan_chunk = plan
    rest = skip_first_batches(prepared, 9)
    rest.set_epoch(2)
    batches = [rows_of(batch["input_ids"]) for batch in rest]
    fresh = GPUBatchRebalanceSampler(LENGTHS, 8, grad_accum=2)
    fresh.set_epoch(2)
    assert batches == list(fresh)[9:]
    assert planned == [(2, 4), (2, 5)]


def stateful(workers: int, own: bool) -> tuple[Accelerator, GPUBatchRebalanceSampler, DataLoader]:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    data = loader(num_workers=workers)
    return accelerator, data.batch_sampler, (accelerator.prepare(data) if own else prepare(accelerator, data))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_l14_l43_epochs_where_accelerate_uses_a_stateful_loader(tmp_path: Path, workers: int, own: bool):
    accelerator, _, prepared = stateful(workers, own)
    fresh = GPUBatchRebalanceSampler(LENGTHS, 8, grad_accum=2)
    fresh.set_epoch(1)
    late = r"set_epoch\(1\) does not reach the iteration .* goes through epoch 0"
    with pytest.warns(UserWarning, match=late) if own else nullcontext():
        prepared.set_epoch(1)
    if own:
        assert Counter(row for batch in prepared for row in rows_of(batch["input_ids"])) == Counter(range(48))
        prepared.set_epoch(1)
    batches = iter(prepared)
    taken = [rows_of(next(batches)["input_ids"]) for _ in range(3)]
    accelerator.save_state(tmp_path)
    accelerator, sampler, prepared = stateful(workers, own)
    accelerator.load_state(tmp_path)
    assert sampler.epoch == (0 if own else 1)
    with pytest.warns(UserWarning, match="position in epoch 1, but set_epoch chose 0") if own else nullcontext():
        rest = [rows_of(batch["input_ids"]) for batch in prepared]
    assert taken + rest == list(fresh)


def test_l44_skipping_all_leaves_nothing():
    rest = skip_first_batches(prepare_loader(Accelerator(cpu=True), loader()), 12)
    assert list(rest) == []


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(48))


def test_l25_an_iterable_dataset_is_refused():
    with pytest.raises(ValueError, match="IterableDataset"):
        prepare(
            Accelerator(cpu=True),
            DataLoader(Stream(), batch_sampler=GPUBatchRebalanceSampler(LENGTHS, 8, grad_accum=2)),
        )


def test_a_dataset_of_another_size_is_refused():
    sampler = GPUBatchRebalanceSampler(LENGTHS, 8)
    with pytest.raises(ValueError, match="has 47 samples, but its sampler was given 48 lengths"):
        prepare(Accelerator(cpu=True), DataLoader(Rows(LENGTHS[:47]), batch_sampler=sampler))
