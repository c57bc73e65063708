"""Inputs that broke other samplers; each test carries the id of its row."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
import textwrap
from collections import Counter

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from brute_force import cuts
from torch.utils.data import DataLoader, Dataset

from gpusampler import CostModel, GPUBatchRebalanceSampler, microbatch_weight, plan_batches
from gpusampler.kernels import spec
from helpers import check_invariants, half_square, padded_cost, peak, ranks, step_costs, yields

REFERENCE_COST = CostModel(alpha=1e-3)


def test_l03_group_sizes_of_a_small_batch():
    lengths = [128, 256, 512, 768, 1024, 1536, 2048, 4096]
    samplers = ranks(lengths, 8, 2, shuffle=False, cost=REFERENCE_COST)
    plans = yields(samplers)
    check_invariants(samplers, plans)
    assert {len(plan[0]) for plan in plans} == {2, 6}


def test_l03_step_cost_of_twelve_samples():
    lengths = [1024, 1024, 16, 4096, 16, 4096, 1024, 4096, 4096, 1024, 4096, 1024]
    samplers = ranks(lengths, 12, 2, shuffle=False, cost=REFERENCE_COST)
    plans = yields(samplers)
    check_invariants(samplers, plans)
    assert step_costs(lengths, plans, 1, 1e-3)[0] == pytest.approx(104366.08)
    order = sorted(lengths, reverse=True)
    best = min(
        max(cut * (order[0] + 1e-3 * order[0] ** 2), (12 - cut) * (order[cut] + 1e-3 * order[cut] ** 2))
        for cut in range(1, 12)
    )
    assert best == pytest.approx(104366.08)


@pytest.mark.parametrize(
    ("lengths", "dp_size", "grad_accum", "alpha"),
    [
        ([2048] * 3 + [1024] * 3 + [256] * 2 + [128] * 3 + [64, 32, 16], 3, 4, 1e-4),
        ([4096] + [2048] * 5 + [1024] * 3 + [128] * 2 + [64] * 2 + [16], 2, 5, 1e-3),
        ([4096] * 3 + [2048] * 4 + [1024] * 2 + [128] + [64] * 3 + [32] + [16] * 3, 3, 5, 1e-3),
        ([1327, 1221, 755, 686, 471, 471, 190, 127, 101], 2, 4, 1e-3),
        ([2976, 2903, 2900, 2813, 2738, 2135, 1496, 1496, 1477, 1085, 1050, 949, 755, 730, 367, 66], 3, 5, 1e-3),
    ],
)
def test_l03_hardly_more_samples_than_groups(lengths: list[int], dp_size: int, grad_accum: int, alpha: float):
    groups = dp_size * grad_accum
    costs = [length + alpha * length**2 for length in lengths]
    best = min(
        sum(sorted((n * costs[i] for n, i in zip(cut, np.cumsum([0, *cut]), strict=False)), reverse=True)[::dp_size])
        for cut in cuts(len(lengths), groups)
    )
    plan = plan_batches(torch.tensor([lengths]), dp_size, grad_accum, cost=CostModel(alpha=alpha))
    assert plan.step_cost.item() == pytest.approx(best, rel=1e-6)


def test_l11_fewer_samples_than_groups_are_repeated():
    samplers = ranks([5, 9, 2], 7, 7, drop_last=False)
    plans = yields(samplers)
    counts = check_invariants(samplers, plans)
    assert [len(plan) for plan in plans] == [1] * 7
    assert sorted(counts.values(), reverse=True) == [3, 2, 2]
    assert samplers[0].repeated == 4
    assert sum(any(sampler.repeats(0, 0)) for sampler in samplers) == 4


def test_l11_fewer_samples_than_a_batch_is_an_error():
    with pytest.raises(ValueError, match=r"lengths must have at least effective_batch_size = 7 .* got 3"):
        GPUBatchRebalanceSampler([5, 9, 2], 7, 7, drop_last=True)


def test_l11_small_tail_leaves_no_rank_empty():
    samplers = ranks(range(1, 10), 16, 4, drop_last=False)
    counts = check_invariants(samplers, yields(samplers))
    assert counts == Counter(range(9))


def test_l15_large_lengths_keep_every_token():
    lengths = torch.tensor([[1048576, 1048575] * 512])
    plan = plan_batches(lengths, 8, 4)
    row = lengths[0].tolist()
    order, offsets = plan.order[0].tolist(), plan.offsets[0].tolist()
    for group in range(32):
        members = order[offsets[group] : offsets[group + 1]]
        longest = max(row[i] for i in members)
        assert plan.tokens.reshape(-1)[group] == len(members) * longest
    assert sorted(order) == list(range(1024))
    assert int(torch.tensor([2**24] + [1] * 7).cumsum(0)[-1]) == 16777223
    f = np.array([2**24] + [1] * 7, dtype=np.int64)
    costs = np.empty(1, dtype=np.int64)
    spec.group_costs(f, np.array([8]), costs)
    assert costs.tolist() == [2**27]


def test_l16_ties_go_to_the_smaller_position():
    lengths = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5])
    order = np.empty(9, dtype=np.int64)
    spec.sort_row(lengths, order)
    assert order.tolist() == [5, 7, 4, 8, 2, 0, 6, 1, 3]
    assert torch.sort(torch.from_numpy(lengths), descending=True, stable=True).indices.tolist() == order.tolist()


@pytest.mark.parametrize("container", ["list", "int64", "int32", "tensor", "column", "chunked", "range"])
def test_l22_containers_give_the_same_plan_of_builtin_ints(container: str):
    values = list(range(10, 34))
    made = {
        "list": values,
        "int64": np.array(values),
        "int32": np.array(values, dtype=np.int32),
        "tensor": torch.tensor(values),
        "column": datasets.Dataset.from_dict({"length": values})["length"],
        "chunked": pa.chunked_array([values[:5], values[5:]]),
        "range": range(10, 34),
    }[container]
    samplers = ranks(made, 8, 2)
    plans = yields(samplers)
    check_invariants(samplers, plans)
    assert plans == yields(ranks(values, 8, 2))


def test_l23_squares_do_not_wrap():
    lengths = np.array([46341] * 2 + [32768] * 4, dtype=np.int32)
    samplers = ranks(lengths, 6, 2, shuffle=False, cost=REFERENCE_COST)
    plans = yields(samplers)
    check_invariants(samplers, plans)
    assert sorted(len(plan[0]) for plan in plans) == [2, 4]
    assert plans == yields(ranks(lengths.tolist(), 6, 2, shuffle=False, cost=REFERENCE_COST))


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 6), (True, 4)])
def test_l28_length_is_right_and_constant(drop_last: bool, expected: int):
    sampler = GPUBatchRebalanceSampler(range(1, 11), 4, grad_accum=2, drop_last=drop_last)
    loader = DataLoader(range(10), batch_sampler=sampler)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        assert len(sampler) == len(list(sampler)) == len(loader) == expected


def test_l28_length_with_a_tail_below_the_groups():
    samplers = ranks([10] * 33, 32, 2, 2, drop_last=False)
    for epoch in range(20):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        plans = yields(samplers)
        check_invariants(samplers, plans)
        assert [len(plan) for plan in plans] == [4, 4]


@pytest.mark.parametrize(
    ("lengths", "index", "value"),
    [
        ([0, 5, 7, 3], 0, "0"),
        ([3.2, float("nan"), 1.5, 2.0], 1, "nan"),
        ([3, float("inf"), 1, 2], 1, "inf"),
        ([3, None, 1, 2], 1, "None"),
        ([3, 1, -4, 2], 2, "-4"),
        ([3, "4", 1, 2], 1, "'4'"),
    ],
)
def test_l29_bad_lengths_are_named(lengths: list[object], index: int, value: str):
    with pytest.raises(ValueError, match=rf"lengths\[{index}\] = {value}"):
        GPUBatchRebalanceSampler(lengths, 2, 2)


def test_l32_a_cap_that_just_fits():
    samplers = ranks([7] * 8, 8, 8, max_tokens=8)
    plans = yields(samplers)
    check_invariants(samplers, plans)
    assert [len(plan[0]) for plan in plans] == [1] * 8


def test_l32_a_cap_that_cannot_be_met():
    with pytest.raises(ValueError, match=r"max_tokens=8 cannot be met in step 0 of epoch 0.*at least 8 micro-batches"):
        GPUBatchRebalanceSampler([7] * 8, 8, 4, max_tokens=8)


def test_l32_a_sample_above_the_cap():
    with pytest.raises(ValueError, match=r"max_tokens=4096 is below lengths\[0\] = 5000"):
        GPUBatchRebalanceSampler([5000, 10, 10, 10], 4, 2, max_tokens=4096)


def test_l32_a_sample_above_the_cap_goes_alone():
    with pytest.warns(UserWarning, match=r"lengths\[0\] = 5000") as caught:
        samplers = ranks([5000, 10, 10, 10], 4, 2, max_tokens=4096, oversize="alone")
    assert len(caught) == 2  # one a sampler
    plans = yields(samplers)
    check_invariants(samplers, plans)
    assert [0] in [plan[0] for plan in plans]
    assert sorted(len(plan[0]) for plan in plans) == [1, 3]


@pytest.mark.parametrize("cost", [CostModel(), REFERENCE_COST])
def test_l34_long_rows_are_spread(cost: CostModel):
    lengths = [1024] * 8 + [64] * 56
    samplers = ranks(lengths, 64, 2, 2, shuffle=False, cost=cost)
    plans = yields(samplers)
    check_invariants(samplers, plans)
    assert peak(lengths, plans) <= 3584


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rank": -1}, "rank"),
        ({"rank": 2}, "rank"),
        ({"dp_size": 0}, "dp_size"),
        ({"dp_size": -2}, "dp_size"),
        ({"grad_accum": 0}, "grad_accum"),
        ({"effective_batch_size": 3, "grad_accum": 2}, "effective_batch_size"),
        ({"effective_batch_size": 0}, "effective_batch_size"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10.5}, "max_tokens"),
        ({"dp_size": True}, "dp_size"),
        ({"dp_size": 2.0}, "dp_size"),
        ({"effective_batch_size": True}, "effective_batch_size"),
        ({"grad_accum": True}, "grad_accum"),
        ({"rank": False}, "rank"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"shuffle": 1}, "shuffle"),
        ({"drop_last": "no"}, "drop_last"),
        ({"oversize": "drop"}, "oversize"),
        ({"layout": "ragged"}, "layout"),
        ({"sync": "never"}, "sync"),
        ({"cost": 1e-4}, "cost"),
        ({"plan_ahead": 0}, "plan_ahead"),
        ({"lookahead": 0}, "lookahead"),
        ({"pad_multiple": 0}, "pad_multiple"),
        ({"process_group": "world"}, "process_group"),
        ({"device": "gpu"}, "device"),
    ],
)
def test_l40_bad_parameters_are_named(options: dict[str, object], name: str):
    arguments = {"effective_batch_size": 8, "dp_size": 2, "rank": 0, **options}
    with pytest.raises(ValueError, match=name):
        GPUBatchRebalanceSampler(range(1, 41), **arguments)


@pytest.mark.parametrize(
    "options", [{"alpha": float("nan")}, {"alpha": -1e-4}, {"alpha": float("inf")}, {"intercept": -1}, {"alpha": True}]
)
def test_l40_bad_costs_are_named(options: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(options))):
        CostModel(**options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"layout": "packed"}, "layout"),
        ({"lookahead": 4}, "lookahead"),
        ({"pad_multiple": 8}, "pad_multiple"),
    ],
)
def test_options_to_come_say_so(options: dict[str, object], name: str):
    with pytest.raises(NotImplementedError, match=rf"{name}=.*not available yet"):
        GPUBatchRebalanceSampler(range(1, 41), 8, 2, **options)


class _Samples(Dataset[int]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("rank", [-1, 2, 1.0, "0", None, True])
def test_l40_a_rank_set_later_is_checked(rank: object):
    sampler = GPUBatchRebalanceSampler(range(1, 41), 8, 2, rank=0)
    with pytest.raises(ValueError, match=r"^rank must be"):
        sampler.rank = rank
    sampler.rank = 1
    assert list(sampler) == list(GPUBatchRebalanceSampler(range(1, 41), 8, 2, rank=1))


def test_l40_what_a_sampler_was_made_with_cannot_be_changed():
    sampler = GPUBatchRebalanceSampler(range(1, 41), 8, 2, rank=0)
    for name in ("dp_size", "grad_accum", "effective_batch_size", "seed", "shuffle", "drop_last", "lengths"):
        with pytest.raises(ValueError, match=rf"^{name} cannot be changed from .* to 3, make another sampler"):
            setattr(sampler, name, 3)
    with pytest.raises(ValueError, match="epoch must be at least 0, got -2"):
        sampler.epoch = -2
    assert list(pickle.loads(pickle.dumps(sampler))) == list(copy.deepcopy(sampler)) == list(sampler)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_l41_persistent_workers_see_every_epoch(method: str):
    lengths = list(range(1, 97))
    sampler = GPUBatchRebalanceSampler(lengths, 16, 2, grad_accum=2, rank=1)
    loader = DataLoader(
        _Samples(), batch_sampler=sampler, num_workers=2, persistent_workers=True, multiprocessing_context=method
    )
    plain = GPUBatchRebalanceSampler(lengths, 16, 2, grad_accum=2, rank=1)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        plain.set_epoch(epoch)
        orders.append([batch.tolist() for batch in loader])
        assert orders[-1] == list(plain)
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("seed", range(5))
def test_l42_a_cap_keeps_counts_equal(seed: int):
    lengths = [2000] * 8 + [20] * 248
    samplers = ranks(lengths, 64, 2, 2, max_tokens=16384, seed=seed)
    plans = yields(samplers)
    check_invariants(samplers, plans)
    assert [len(plan) for plan in plans] == [8, 8]
    assert peak(lengths, plans) <= 16384


def test_l43_resume_in_a_later_epoch():
    lengths = list(range(1, 41))
    for rank in range(2):
        straight = GPUBatchRebalanceSampler(lengths, 8, 2, rank=rank)
        straight.set_epoch(1)
        iterator = iter(straight)
        head = [next(iterator) for _ in range(2)]
        state = pickle.loads(pickle.dumps(straight.state_dict()))
        rest = list(iterator)
        resumed = GPUBatchRebalanceSampler(lengths, 8, 2, rank=rank)
        resumed.load_state_dict(state)
        resumed.set_epoch(1)
        assert list(resumed) == rest
        assert list(resumed) == head + rest
        straight.set_epoch(2)
        resumed.set_epoch(2)
        assert list(resumed) == list(straight)
        assert len(resumed) == len(straight) == 5


@pytest.mark.parametrize("stop", ["inside", "after"])
@pytest.mark.parametrize("workers", [0, 2])
def test_l44_prefetched_batches_are_not_consumed(workers: int, stop: str):
    sampler = GPUBatchRebalanceSampler(range(1, 33), 4)
    options = {"num_workers": workers, "prefetch_factor": 2} if workers else {}
    loader = DataLoader(range(32), batch_sampler=sampler, **options)
    taken, state = [], None
    for batch in loader:
        taken.append(batch.tolist())
        if len(taken) == 3:
            if stop == "inside":
                state = sampler.state_dict()
            break
    state = state or sampler.state_dict()
    assert state["consumed"] == 3
    resumed = GPUBatchRebalanceSampler(range(1, 33), 4)
    resumed.load_state_dict(state)
    assert taken + list(resumed) == list(GPUBatchRebalanceSampler(range(1, 33), 4))


def test_l44_a_count_given_by_the_loop_wins():
    sampler = GPUBatchRebalanceSampler(range(1, 33), 4)
    next(iter(sampler))
    assert sampler.state_dict()["consumed"] == 1
    assert sampler.state_dict(consumed=5)["consumed"] == 5
    with pytest.raises(ValueError, match="consumed must be at most 8, got 9"):
        sampler.state_dict(consumed=9)


def test_l45_another_layout_continues_with_the_other_rows():
    lengths = list(range(1, 17))
    first = GPUBatchRebalanceSampler(lengths, 4)
    taken = next(iter(first))
    samplers = ranks(lengths, 4, 2)
    for sampler in samplers:
        sampler.load_state_dict(first.state_dict())
    rest = [i for plan in yields(samplers) for micro_batch in plan for i in micro_batch]
    assert Counter(rest) == Counter(set(range(16)) - set(taken))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lengths": list(range(1, 18))}, "num_samples"),
        ({"lengths": [2, *range(2, 17)]}, "lengths_digest"),
        ({"effective_batch_size": 8}, "effective_batch_size"),
        ({"seed": 7}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"drop_last": False}, "drop_last"),
    ],
)
def test_l45_another_composition_is_refused(change: dict[str, object], field: str):
    base = {"lengths": list(range(1, 17)), "effective_batch_size": 4}
    saved = GPUBatchRebalanceSampler(**base)
    next(iter(saved))
    with pytest.raises(ValueError, match=rf"^{field} was "):
        GPUBatchRebalanceSampler(**{**base, **change}).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dp_size": 2, "rank": 0}, "dp_size"),
        ({"grad_accum": 4}, "grad_accum"),
        ({"cost": CostModel(alpha=1e-3)}, "cost"),
        ({"max_tokens": 100}, "max_tokens"),
        ({"sync": "step"}, "sync"),
    ],
)
def test_l45_another_partition_is_refused_within_a_step(change: dict[str, object], field: str):
    base = {"lengths": list(range(1, 17)), "effective_batch_size": 4, "grad_accum": 2}
    saved = GPUBatchRebalanceSampler(**base)
    iterator = iter(saved)
    next(iterator)
    changed = GPUBatchRebalanceSampler(**{**base, **change})
    with pytest.raises(ValueError, match=rf"^{field} was .*1 of 2 micro-batches into step 0"):
        changed.load_state_dict(saved.state_dict())
    next(iterator)
    changed.load_state_dict(saved.state_dict())
    assert sum(map(len, changed)) == (6 if "dp_size" in change else 12)


def test_l48_global_generators_do_not_matter():
    plans = []
    for rank in range(4):
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
        plans.append(list(GPUBatchRebalanceSampler(range(5, 17), 4, 4, seed=None, rank=rank)))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()
        assert random.getstate() == before[2]
    assert Counter(i for plan in plans for m in plan for i in m) == Counter(range(12))


def test_l50_the_tail_is_kept_as_it_is():
    samplers = ranks(range(100, 118), 16, drop_last=False)
    plans = yields(samplers)
    check_invariants(samplers, plans)
    assert [len(m) for m in plans[0]] == [16, 2]


def test_l50_a_tail_below_the_groups_is_filled_to_the_groups():
    samplers = ranks([10] * 33, 32, 2, 2, drop_last=False)
    plans = yields(samplers)
    counts = check_invariants(samplers, plans)
    assert sum(counts.values()) == 36
    marks = [sampler.repeats(1, slot) for sampler in samplers for slot in range(2)]
    assert sorted(map(tuple, marks)) == [(False,), (True,), (True,), (True,)]


def test_l54_works_without_triton():
    code = """
        import sys
        sys.modules["triton"] = None
        from gpusampler import GPUBatchRebalanceSampler
        print(list(GPUBatchRebalanceSampler(range(1, 9), 4, 2, rank=0)))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == str(list(GPUBatchRebalanceSampler(range(1, 9), 4, 2, rank=0)))


def test_l56_import_does_not_touch_cuda():
    code = "import gpusampler, torch; print(torch.cuda.is_initialized())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("cost", [CostModel(), CostModel(cost_fn=half_square)])
def test_l56_samplers_can_be_pickled(cost: CostModel):
    sampler = GPUBatchRebalanceSampler(range(1, 41), 8, 2, rank=1, cost=cost)
    iterator = iter(sampler)
    next(iterator)
    for twin in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        assert twin.state_dict() == sampler.state_dict()
        assert list(twin) == list(GPUBatchRebalanceSampler(range(1, 41), 8, 2, rank=1, cost=cost))


def test_l56_a_lambda_cost_is_named():
    sampler = GPUBatchRebalanceSampler(range(1, 41), 8, 2, rank=1, cost=CostModel(cost_fn=lambda n: n * 1.0))
    with pytest.raises(pickle.PicklingError, match="cost_fn"):
        pickle.dumps(sampler)


def test_l18_weights_undo_uneven_micro_batches():
    tokens, losses = (8192, 5120), (1.0, 3.0)
    weighted = [microbatch_weight(n, sum(tokens), 2) * loss for n, loss in zip(tokens, losses, strict=True)]
    assert sum(weighted) / 2 == pytest.approx(1.769231, abs=1e-6)


def test_l18_weighted_gradients_equal_one_process():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(24, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(24, generator=generator, dtype=torch.float64)

    def gradient(rows: list[int]) -> torch.Tensor:
        weights = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        ((features[rows] @ weights - targets[rows]) ** 2).mean().backward()
        assert weights.grad is not None
        return weights.grad

    samplers = ranks([1, 1, 30, 2, 2, 2, 9, 1, 14, 3, 3, 1] * 2, 24, 2, 3, shuffle=False)
    plans = yields(samplers)
    assert len({len(m) for plan in plans for m in plan}) > 1
    total = torch.zeros(5, dtype=torch.float64)
    for plan in plans:
        rank_gradient = sum(microbatch_weight(len(m), 24, dp_size=2) * gradient(m) for m in plan)
        total += rank_gradient / 2
    assert torch.allclose(total, gradient(list(range(24))), atol=1e-12)


def test_padded_cost_of_the_reference():
    assert padded_cost([100, 50], [0, 1], 1e-3) == 220.0
