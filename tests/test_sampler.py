"""The sampler's guarantees, for any sizes: coverage, equal counts, composition, exact and elastic resume, bad input."""

from __future__ import annotations

import inspect
import json
import pickle
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import BatchRebalanceSampler

from gpusampler import CostModel, GPUBatchRebalanceSampler
from gpusampler.errors import ParameterError
from helpers import check_invariants, half_square, peak, ranks, yields

quick = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.filter_too_much])

COSTS = [CostModel(), CostModel(alpha=0.0, intercept=5.0), CostModel(alpha=0.1), CostModel(cost_fn=half_square)]


@st.composite
def setups(draw: Any, max_samples: int = 90) -> dict[str, Any]:
    """Arguments of a sampler that can be built."""
    dp_size, grad_accum = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    groups = dp_size * grad_accum
    batch = groups + draw(st.integers(0, 2 * groups))
    drop_last = draw(st.booleans())
    samples = draw(st.integers(batch if drop_last else 1, max(batch, max_samples)))
    kind = draw(st.sampled_from(["equal", "giant", "any", "few"]))
    lengths = {
        "equal": st.just([7] * samples),
        "giant": st.just([1] * (samples - 1) + [10**6]),
        "any": st.lists(st.integers(1, 5000), min_size=samples, max_size=samples),
        "few": st.lists(st.sampled_from([1, 16, 1024]), min_size=samples, max_size=samples),
    }[kind]
    return {
        "lengths": draw(lengths),
        "batch": batch,
        "dp_size": dp_size,
        "grad_accum": grad_accum,
        "shuffle": draw(st.booleans()),
        "seed": draw(st.one_of(st.integers(-3, 3), st.integers())),
        "drop_last": drop_last,
        "cost": draw(st.sampled_from(COSTS)),
        "sync": draw(st.sampled_from(["microbatch", "step"])),
        "plan_ahead": draw(st.one_of(st.none(), st.integers(1, 3))),
    }


def one(setup: dict[str, Any], **changes: Any) -> GPUBatchRebalanceSampler:
    options = {"rank": 0, **setup, **changes}
    return GPUBatchRebalanceSampler(options.pop("lengths"), options.pop("batch"), **options)


@quick
@given(setups(), st.integers(0, 3))
def test_every_epoch_holds_every_sample_and_every_rank_as_many_micro_batches(setup: dict[str, Any], epoch: int):
    samplers = ranks(**setup)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    plans = yields(samplers)
    counts = check_invariants(samplers, plans)
    total, batch, groups = len(setup["lengths"]), setup["batch"], setup["dp_size"] * setup["grad_accum"]
    tail = total % batch
    steps = total // batch + (1 if tail and not setup["drop_last"] else 0)
    assert {len(sampler) for sampler in samplers} == {steps * setup["grad_accum"]}
    repeated = 0 if setup["drop_last"] or not tail else max(0, groups - tail)
    assert samplers[0].repeated == repeated == sum(counts.values()) - len(counts)
    if repeated:
        slots = setup["grad_accum"]
        real: Counter[int] = Counter()
        for sampler, plan in zip(samplers, plans, strict=True):
            for slot, micro_batch in enumerate(plan[-slots:]):
                marks = sampler.repeats(steps - 1, slot)
                real.update(i for i, again in zip(micro_batch, marks, strict=True) if not again)
        assert set(real.values()) == {1}
        assert sum(real.values()) == tail


@quick
@given(setups(), st.integers(1, 2000), st.sampled_from(["error", "alone"]))
def test_a_cap_is_kept_or_refused_before_training(setup: dict[str, Any], cap: int, oversize: str):
    lengths = setup["lengths"]
    setup = {**setup, "max_tokens": cap, "oversize": oversize}
    if oversize == "alone" and max(lengths) > cap:
        with pytest.warns(UserWarning, match=f"longer than max_tokens={cap}"):
            samplers = _ranks_or_none(setup)
    else:
        samplers = _ranks_or_none(setup)
    if samplers is None:
        return
    plans = yields(samplers)
    check_invariants(samplers, plans)
    for plan in plans:
        for micro_batch in plan:
            tokens = len(micro_batch) * max(lengths[i] for i in micro_batch)
            assert tokens <= cap or len(micro_batch) == 1
    assert oversize == "alone" or peak(lengths, plans) <= cap


def _ranks_or_none(setup: dict[str, Any]) -> list[GPUBatchRebalanceSampler] | None:
    try:
        return ranks(**setup)
    except ParameterError as error:
        if "max_tokens" not in str(error):
            raise
        return None


@quick
@given(setups(), setups())
def test_composition_does_not_depend_on_the_partition(setup: dict[str, Any], other: dict[str, Any]):
    groups = other["dp_size"] * other["grad_accum"]
    assume(groups <= setup["batch"])
    tail = len(setup["lengths"]) % setup["batch"]
    assume(setup["drop_last"] or tail == 0 or tail >= max(groups, setup["dp_size"] * setup["grad_accum"]))
    a = one(setup)
    b = one({**setup, **{name: other[name] for name in ("dp_size", "grad_accum", "cost", "sync", "plan_ahead")}})
    for step in range(a.composition.steps):
        for epoch in (0, 1, 7):
            assert a.indices(step, epoch).tolist() == b.indices(step, epoch).tolist()


@quick
@given(setups(max_samples=40), st.integers(0, 3), st.booleans())
def test_every_micro_batch_is_a_place_to_resume(setup: dict[str, Any], epoch: int, as_json: bool):
    rank = setup["dp_size"] - 1
    straight = one(setup, rank=rank)
    straight.set_epoch(epoch)
    expected = list(straight)
    resumed = one(setup, rank=rank)
    iterator = iter(straight)
    for consumed in range(len(straight) + 1):
        state = straight.state_dict() if consumed else straight.state_dict(consumed=0)
        assert (state["epoch"], state["consumed"]) == (epoch, consumed)
        resumed.load_state_dict(json.loads(json.dumps(state)) if as_json else pickle.loads(pickle.dumps(state)))
        assert resumed.epoch == epoch
        assert resumed.state_dict() == state
        assert list(resumed) == expected[consumed:]
        assert resumed.state_dict()["consumed"] == len(straight)
        assert list(resumed) == expected  # the epoch again, from its start
        next(iterator, None)


@quick
@given(setups(max_samples=60), setups(), st.integers(0, 2), st.data())
def test_another_partition_goes_on_with_the_other_samples(
    setup: dict[str, Any], other: dict[str, Any], epoch: int, data: Any
):
    assume(other["dp_size"] * other["grad_accum"] <= setup["batch"])
    changed = {**setup, **{name: other[name] for name in ("dp_size", "grad_accum", "cost", "sync", "plan_ahead")}}
    first = ranks(**setup)
    step = data.draw(st.integers(0, first[0].composition.steps))
    taken: Counter[int] = Counter()
    for sampler in first:
        sampler.set_epoch(epoch)
        iterator = iter(sampler)
        for _ in range(step * setup["grad_accum"]):
            taken.update(next(iterator))
    states = [sampler.state_dict(consumed=step * setup["grad_accum"]) for sampler in first]
    assert all(state == states[0] for state in states)
    second = ranks(**changed)
    for sampler in second:
        sampler.load_state_dict(states[0])
    assert {sampler.state_dict()["consumed"] for sampler in second} == {step * changed["grad_accum"]}
    rest = Counter(i for plan in yields(second) for micro_batch in plan for i in micro_batch)
    seen = taken + rest
    if setup["drop_last"]:
        assert set(seen.values()) == {1}
        assert len(seen) == len(setup["lengths"]) // setup["batch"] * setup["batch"]
    else:
        assert set(seen) == set(range(len(setup["lengths"])))
        repeats = first[0] if step == first[0].composition.steps else second[0]
        assert sum(seen.values()) - len(seen) == repeats.repeated


# epochs


def test_epochs_differ_and_come_back():
    sampler = GPUBatchRebalanceSampler(range(1, 65), 8, 2, 2, rank=0)
    epochs = []
    for epoch in range(5):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
        assert list(sampler) == epochs[-1]
    assert len({str(epoch) for epoch in epochs}) == 5
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]
    assert [sampler.indices(0, epoch).tolist() for epoch in range(5)] != [sampler.indices(0, 0).tolist()] * 5


def test_without_shuffle_every_epoch_is_in_order():
    sampler = GPUBatchRebalanceSampler(range(1, 25), 8, shuffle=False, seed=9)
    for epoch in (0, 1, 10**30):
        sampler.set_epoch(epoch)
        assert [sorted(m) for m in sampler] == [list(range(8)), list(range(8, 16)), list(range(16, 24))]


def test_set_epoch_does_not_reach_into_an_iteration():
    sampler = GPUBatchRebalanceSampler(range(1, 33), 4, plan_ahead=1)
    expected = list(sampler)
    iterator = iter(sampler)
    got = [next(iterator)]
    sampler.set_epoch(3)
    assert got + list(iterator) == expected
    assert sampler.epoch == 3


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_only():
    saved = GPUBatchRebalanceSampler(range(1, 33), 4)
    saved.set_epoch(2)
    iterator = iter(saved)
    next(iterator), next(iterator)
    for epoch, left in ((2, 6), (1, 8), (3, 8)):
        sampler = GPUBatchRebalanceSampler(range(1, 33), 4)
        sampler.load_state_dict(saved.state_dict())
        assert sampler.epoch == 2
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            sampler.set_epoch(epoch)
        # an earlier epoch would be trained again, which is hardly meant
        forgets = ["forgets the position that was loaded in epoch 2" in str(warning.message) for warning in said]
        assert forgets == ([True] if epoch < 2 else [])
        assert len(list(sampler)) == left


def test_the_hook_for_wrappers_forwards_the_epoch():
    sampler = GPUBatchRebalanceSampler(range(1, 33), 4)
    sampler.sampler.set_epoch(5)
    assert sampler.epoch == 5
    assert len(sampler.sampler) == 32


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None, "1"])
def test_bad_epochs_are_named(epoch: Any):
    sampler = GPUBatchRebalanceSampler(range(1, 33), 4)
    with pytest.raises(ParameterError, match="epoch must be"):
        sampler.set_epoch(epoch)
    assert sampler.epoch == 0


def test_seeds_differ_and_none_is_the_default():
    orders = {seed: list(GPUBatchRebalanceSampler(range(1, 33), 4, seed=seed)) for seed in (0, 1, -1, 42, 2**64 + 9)}
    assert len({str(order) for order in orders.values()}) == 5
    assert list(GPUBatchRebalanceSampler(range(1, 33), 4, seed=None)) == orders[42]
    assert list(GPUBatchRebalanceSampler(range(1, 33), 4)) == orders[42]


# surface


def test_arguments_stand_where_the_transformers_sampler_has_them():
    theirs = list(inspect.signature(BatchRebalanceSampler.__init__).parameters)
    parameters = inspect.signature(GPUBatchRebalanceSampler.__init__).parameters
    ours = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ours == theirs
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name not in ours)
    arguments = (list(range(1, 35)), 8, 2, 2, False, 7, 1, False)
    their_sampler, our_sampler = BatchRebalanceSampler(*arguments), GPUBatchRebalanceSampler(*arguments)
    assert len(our_sampler) == len(their_sampler) == 10
    for name in ("effective_batch_size", "dp_size", "grad_accum", "shuffle", "seed", "rank", "drop_last", "epoch"):
        assert getattr(our_sampler, name) == getattr(their_sampler, name), name
    other = GPUBatchRebalanceSampler(*arguments[:6], 0, False)
    for step in range(4):  # without shuffle both cut the same global batches
        slots = slice(2 * step, 2 * step + 2)
        got = sorted(i for s in (our_sampler, other) for m in list(s)[slots] for i in m)
        assert got == list(range(8 * step, 8 * step + 8))


def test_numpy_and_torch_arguments():
    plain = list(GPUBatchRebalanceSampler(range(1, 41), 8, 2, 2, True, 3, 1))
    lengths = np.arange(1, 41, dtype=np.uint16)
    own = GPUBatchRebalanceSampler(
        lengths, np.int64(8), np.int8(2), np.uint32(2), np.True_, np.int16(3), np.int64(1), np.False_
    )
    assert list(own)[:10] == plain
    assert list(GPUBatchRebalanceSampler(torch.arange(1, 41), 8, 2, 2, True, 3, 1)) == plain


def test_plans_say_what_is_yielded():
    samplers = ranks(range(1, 55), 16, 2, 3, drop_last=False)
    plans = yields(samplers)
    for step in range(4):
        plan, indices = samplers[0].plan(step), samplers[0].indices(step)
        assert indices.dtype == torch.int64
        for slot in range(3):
            for rank in range(2):
                assert indices[plan.microbatch(0, slot, rank).long()].tolist() == plans[rank][3 * step + slot]
    other = samplers[0].plan(0, epoch=3)
    samplers[0].set_epoch(3)
    assert torch.equal(samplers[0].plan(0).order, other.order)


@pytest.mark.parametrize("step", [-1, 4, 1.0, None])
def test_steps_out_of_range_are_named(step: Any):
    sampler = GPUBatchRebalanceSampler(range(1, 55), 16, drop_last=False)
    for method in (sampler.plan, sampler.indices):
        with pytest.raises(ParameterError, match="step must be"):
            method(step)


def test_attributes_that_wrappers_read():
    sampler = GPUBatchRebalanceSampler(range(1, 55), 16, 2, 3, rank=0)
    assert (sampler.batch_size, sampler.drop_last) == (2, True)
    assert isinstance(sampler, torch.utils.data.Sampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_yields_the_same_micro_batches(workers: int):
    sampler = GPUBatchRebalanceSampler(range(1, 41), 8, 2, 2, rank=1)
    loader = DataLoader(range(40), batch_sampler=sampler, num_workers=workers, collate_fn=list)
    assert len(loader) == len(sampler) == 10
    assert list(loader) == list(sampler)
    assert list(loader) == list(sampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_from_a_loaded_state(workers: int):
    # a loader with workers makes two iterators and uses the second
    straight = GPUBatchRebalanceSampler(range(1, 33), 4)
    iterator = iter(straight)
    taken = [next(iterator) for _ in range(3)]
    resumed = GPUBatchRebalanceSampler(range(1, 33), 4)
    resumed.load_state_dict(straight.state_dict())
    loader = DataLoader(range(32), batch_sampler=resumed, num_workers=workers, collate_fn=list)
    assert taken + list(loader) == list(straight)
    assert list(loader) == list(straight)


def test_an_iterator_that_is_never_advanced_takes_nothing():
    saved = GPUBatchRebalanceSampler(range(1, 33), 4)
    next(iter(saved))
    resumed = GPUBatchRebalanceSampler(range(1, 33), 4)
    resumed.load_state_dict(saved.state_dict())
    iter(resumed)
    assert resumed.state_dict()["consumed"] == 1
    assert len(list(resumed)) == 7
    assert len(list(resumed)) == 8


# states


def saved_state(**options: Any) -> dict[str, Any]:
    sampler = GPUBatchRebalanceSampler(range(1, 33), 8, grad_accum=2, **options)
    next(iter(sampler))
    return sampler.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "state has format 99, this version reads format"),
        ({"epoch": -1}, r"state\['epoch'\] must be at least 0, got -1"),
        ({"epoch": 0.0}, r"state\['epoch'\] must be an int, got 0.0"),
        ({"consumed": 9}, r"state\['consumed'\] must be at most 8, got 9"),
        ({"consumed": -1}, r"state\['consumed'\] must be at least 0, got -1"),
        ({"consumed": True}, r"state\['consumed'\] must be an int, got True"),
        ({"grad_accum": 0}, r"state\['grad_accum'\] must be at least 1, got 0"),
        ({"seed": 43}, "seed was 43 when the state was saved and is 42 now"),
        ({"num_samples": 31}, "num_samples was 31 when the state was saved and is 32 now"),
        ({"lookahead": 4}, "lookahead was 4 when the state was saved and is 1 now"),
    ],
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(change: dict[str, Any], message: str):
    sampler = GPUBatchRebalanceSampler(range(1, 33), 8, grad_accum=2)
    before = sampler.state_dict()
    with pytest.raises(ParameterError, match=message):
        sampler.load_state_dict({**saved_state(), **change})
    assert sampler.state_dict() == before


@pytest.mark.parametrize("field", sorted(saved_state()))
def test_states_without_a_field_are_refused(field: str):
    state = saved_state()
    del state[field]
    with pytest.raises(ParameterError, match=f"state has no field '{field}'"):
        GPUBatchRebalanceSampler(range(1, 33), 8, grad_accum=2).load_state_dict(state)


@pytest.mark.parametrize("state", [None, 3, [], "state", {}])
def test_what_is_not_a_state_is_refused(state: Any):
    with pytest.raises(ParameterError, match="state"):
        GPUBatchRebalanceSampler(range(1, 33), 8).load_state_dict(state)


def test_states_are_plain_and_small():
    state = saved_state()
    assert all(type(value) in (int, str, bool, type(None)) for value in state.values())
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 600


def test_a_state_within_a_step_tells_cost_functions_apart_by_their_values():
    def doubled(lengths: torch.Tensor) -> torch.Tensor:
        return lengths * 2.0

    def also_doubled(lengths: torch.Tensor) -> torch.Tensor:
        return lengths + lengths.double()

    state = saved_state(cost=CostModel(cost_fn=doubled))
    same = GPUBatchRebalanceSampler(range(1, 33), 8, grad_accum=2, cost=CostModel(cost_fn=also_doubled))
    same.load_state_dict(state)
    assert len(list(same)) == 7
    other = GPUBatchRebalanceSampler(range(1, 33), 8, grad_accum=2, cost=CostModel(cost_fn=half_square))
    with pytest.raises(ParameterError, match="cost was"):
        other.load_state_dict(state)
