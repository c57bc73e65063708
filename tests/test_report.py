"""Evaluation, report, caps and picture."""

from __future__ import annotations

import itertools
import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusampler import CostModel, GPUBatchRebalanceSampler, plan_batches
from gpusampler.caps import cap_costs
from gpusampler.errors import ParameterError
from gpusampler.evaluate import evaluate, tight_bounds
from gpusampler.lengths import as_lengths
from gpusampler.plan import Partition
from gpusampler.plot import check_plot, plot_report
from gpusampler.report import report_sampler
from gpusampler.strategies import STRATEGIES, Rows
from gpusampler.tables import as_table
from gpusampler.traces import TRACES, load_trace

LENGTHS = np.random.default_rng(1).lognormal(5, 1, 2000).astype(np.int64) + 1


def rows_of(groups):
    offsets = np.cumsum([0, *(len(group) for group in groups)]).astype(np.int32)
    return Rows(np.array([[*itertools.chain(*groups)]]), offsets[None])


def double(lengths):
    return 2.0 * lengths


def test_figures_by_hand():
    lengths = as_lengths([10, 4, 6, 2, 8, 1])
    groups = [[0, 1], [2], [3, 4], [5]]  # slot 0: 2 x 10 and 1 x 6; slot 1: 2 x 8 and 1 x 1 tokens
    for sync, cost in (("microbatch", 22 + 18), ("step", 42 - 2)):
        partition = Partition(2, 2, CostModel(alpha=0.0, intercept=2.0), max_tokens=16, sync=sync)
        figures = evaluate(rows_of(groups), lengths, partition)
        assert figures.cost.tolist() == [cost]
        assert figures.fair.tolist() == [4 + 31 / 2]
        assert figures.bound.tolist() == [4 + 31 / 2]
        assert figures.work.tolist() == [(22 + 8 + 18 + 3) / 2]
        assert figures.longest.tolist() == [10 / (31 / 2)]
        assert (figures.tokens.item(), figures.padded.item(), figures.peak.item()) == (31, 20 + 6 + 16 + 1, 20)
        assert figures.over_cap.tolist() == [1]
        assert figures.mean_length.tolist() == [31 / 6]


def test_step_sync_takes_the_rank_that_has_most_in_all():
    groups = [[0], [1], [2], [3]]  # rank 0 runs 9 and 1, rank 1 runs 8 and 7
    lengths = as_lengths([9, 8, 1, 7])
    costs = [
        evaluate(rows_of(groups), lengths, Partition(2, 2, CostModel(alpha=0.0), sync=sync)).cost.item()
        for sync in ("microbatch", "step")
    ]
    assert costs == [9 + 7, 8 + 7]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_figures_are_those_of_the_plan(data):
    dp_size, grad_accum = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 1000), min_size=dp_size * grad_accum, max_size=40))
    sync = data.draw(st.sampled_from(["microbatch", "step"]))
    cost = data.draw(st.sampled_from([CostModel(), CostModel(alpha=0.01, intercept=50.0), CostModel(cost_fn=double)]))
    plan = plan_batches(torch.tensor([lengths]), dp_size, grad_accum, cost=cost, sync=sync)
    rows = Rows(plan.order.numpy().astype(np.int64), plan.offsets.numpy())
    partition = Partition(dp_size, grad_accum, cost, sync=sync)
    figures = evaluate(rows, as_lengths(lengths), partition)
    assert figures.cost == pytest.approx(plan.step_cost.numpy(), rel=1e-9)
    assert figures.bound == pytest.approx(plan.lower_bound.numpy(), rel=1e-9)
    assert figures.peak.tolist() == plan.tokens.amax((1, 2)).tolist()
    tight = tight_bounds(rows, as_lengths(lengths), partition)
    assert figures.bound.item() <= tight.item() * (1 + 1e-9)
    assert tight.item() <= figures.cost.item() * (1 + 1e-9)
    assert figures.fair.item() <= figures.work.item() * (1 + 1e-9)
    assert figures.work.item() <= figures.cost.item() * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=3, max_size=8), st.integers(1, 3))
def test_tight_bound_is_the_least_padding_over_all_cuts(lengths, dp_size):
    partition = Partition(dp_size, 1, CostModel(alpha=0.1, intercept=3.0))
    rows = rows_of([[i] for i in range(dp_size - 1)] + [list(range(dp_size - 1, len(lengths)))])
    costs = sorted((length + 0.1 * length * length for length in lengths), reverse=True)
    cuts = itertools.combinations(range(1, len(costs)), dp_size - 1)
    least = min(sum((b - a) * costs[a] for a, b in itertools.pairwise([0, *cut, len(costs)])) for cut in cuts)
    expected = 3.0 + max(least / dp_size, costs[0])
    assert tight_bounds(rows, as_lengths(lengths), partition).item() == pytest.approx(expected, rel=1e-12)


def test_L34_longest_rows_together():
    sampler = GPUBatchRebalanceSampler([1024] * 8 + [64] * 56, 64, 2, 2, shuffle=False, cost=CostModel(alpha=0.001))
    report = report_sampler(sampler, peers=("length-grouped", "transformers"))
    grouped, transformers, ours = (int(each.figures.peak.max()) for each in report.strategies)
    assert grouped == 16384
    assert transformers == 3584
    assert ours <= 3584


def test_report_of_every_strategy():
    sampler = GPUBatchRebalanceSampler(LENGTHS, 100, 4, 2, max_tokens=20_000)
    report = report_sampler(sampler, peers=STRATEGIES[:-1], caps=True)
    assert [each.name for each in report.strategies] == list(STRATEGIES)
    by_name = {each.name: each for each in report.strategies}
    ours = by_name["gpusampler"]
    assert ours is report.ours
    assert ours.relative == 1.0
    assert ours.steps.tolist() == list(range(20))
    for each in report.strategies:
        assert len(each.figures) == 20
        assert each.figures.tokens.sum() == LENGTHS.sum()
        assert each.over_bound.min() >= 1.0
        assert each.over_tight.mean() <= each.over_bound.mean()
        assert each.relative >= 1.0
        assert 0.0 <= each.padding < 1.0
        assert 0.0 <= each.idle < 1.0
    assert ours.figures.over_cap.sum() == 0
    assert by_name["random"].figures.over_cap.sum() > 0
    assert by_name["length-grouped"].spread > 5 * ours.spread
    assert by_name["random"].spread == ours.spread
    assert by_name["random"].padding == pytest.approx(1 - LENGTHS.sum() / by_name["random"].figures.padded.sum())
    json.dumps(report.to_dict(), allow_nan=False)
    assert str(report).count("\ngpusampler ") == 1


def test_same_report_but_for_times():
    def summary(seed):
        report = report_sampler(GPUBatchRebalanceSampler(LENGTHS, 50, 2, 2, seed=seed), max_steps=10, caps=True)
        result = report.to_dict()
        for each in result["strategies"]:
            del each["planning_ms"]
        return result, report.ours.steps.tolist()

    first, steps = summary(3)
    assert summary(3) == (first, steps)
    other, other_steps = summary(-4)
    assert other["strategies"] != first["strategies"]
    assert other_steps != steps
    assert steps == sorted(set(steps))
    assert len(steps) == 10
    assert "10, drawn at random from the 40 of epoch 0" in str(
        report_sampler(GPUBatchRebalanceSampler(LENGTHS, 50, 2, 2), max_steps=10)
    )


def test_epoch_and_position_stay():
    sampler = GPUBatchRebalanceSampler(LENGTHS, 50, 2, 2)
    sampler.set_epoch(3)
    iterator = iter(sampler)
    taken = [next(iterator) for _ in range(3)]
    state = sampler.state_dict()
    report = sampler.report(max_steps=5)
    assert report.settings["epoch"] == 3
    assert sampler.state_dict() == state
    twin = GPUBatchRebalanceSampler(LENGTHS, 50, 2, 2)
    twin.set_epoch(3)
    assert taken + list(iterator) == list(twin)
    costs = [twin.plan(step).step_cost.item() for step in report.ours.steps.tolist()]
    assert report.ours.figures.cost == pytest.approx(np.array(costs))


def test_tail_step_with_repeats():
    sampler = GPUBatchRebalanceSampler([5] * 9, 8, 2, 2, drop_last=False, cost=CostModel(alpha=0.0))
    report = report_sampler(sampler, peers=STRATEGIES[:-1], caps=True)
    for each in report.strategies:
        assert each.figures.tokens.tolist() == [40, 20]
        assert each.figures.cost.tolist() == [20.0, 10.0]
    only_tail = GPUBatchRebalanceSampler([5] * 3, 8, 2, 2, drop_last=False)
    report = report_sampler(only_tail, peers=STRATEGIES[:-1], caps=True)
    assert [each.figures.tokens.tolist() for each in report.strategies] == [[20]] * 5


def test_floor_of_one_long_sample():
    # costs 9 and 7 x 1: a rank's fair share is 16 / 4, the long sample is 9
    sampler = GPUBatchRebalanceSampler([9] + [1] * 7, 8, 4, 1, cost=CostModel(alpha=0.0))
    floor = sampler.report().floor
    assert floor == {"longest_over_fair_mean": 2.25, "longest_over_fair_worst": 2.25, "bound_share": 1.0, "cost": 2.25}
    even = GPUBatchRebalanceSampler([2] * 8, 8, 4, 1, cost=CostModel(alpha=0.0)).report()
    assert even.floor == {
        "longest_over_fair_mean": 0.5, "longest_over_fair_worst": 0.5, "bound_share": 0.0, "cost": 1.0,
    }  # fmt: skip
    assert "no step is bound by it" in str(even)


def test_L32_cap_that_needs_more_slots():
    rows = np.full((3, 8), 7)
    caps = {each.max_tokens: each for each in cap_costs(rows, 7, Partition(4, 1, CostModel(alpha=0.0)))}
    assert list(caps) == [None, 11, 8, 7]  # 0.8, 0.6 of the peak of 14 tokens, and the longest sample
    assert (caps[None].peak, caps[None].unfit, caps[None].relative) == (14, 0.0, 1.0)
    for cap in (11, 8, 7):
        assert (caps[cap].unfit, caps[cap].grad_accum, caps[cap].relative) == (1.0, 2, 1.0)
        assert caps[cap].peak == 7


def test_cap_that_no_number_of_slots_meets():
    # 5 samples of 7 tokens need 5 micro-batches, but 2 ranks run 4 or 6
    caps = cap_costs(np.full((1, 5), 7), 7, Partition(2, 2))
    assert (caps[-1].max_tokens, caps[-1].grad_accum, caps[-1].relative) == (7, None, None)
    sampler = GPUBatchRebalanceSampler([7] * 5, 5, 2, 2)
    assert "none does" in str(report_sampler(sampler, caps=True))


def test_slow_peer_is_left_out_and_said_so():
    sampler = GPUBatchRebalanceSampler(np.full(20_000, 3), 16_384, 1024, 1)
    report = report_sampler(sampler, peers=("transformers",), max_steps=1)
    assert [each.name for each in report.strategies] == ["gpusampler"]
    assert "transformers: left out, takes about 13 s to plan a step" in str(report)


def test_missing_peer_is_left_out_and_said_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.trainer_pt_utils", None)
    text = str(report_sampler(GPUBatchRebalanceSampler(LENGTHS, 50, 2), peers=STRATEGIES[:-1]))
    assert "transformers: left out, needs transformers" in text
    assert "0.001" not in text


def test_peers_are_checked_and_need_not_leave_out_the_sampler():
    sampler = GPUBatchRebalanceSampler(LENGTHS, 50, 2)
    with pytest.raises(ParameterError, match=r"strategy must be one of 'random', .* got 'best'"):
        report_sampler(sampler, peers=("best",))
    assert [each.name for each in report_sampler(sampler, peers=STRATEGIES[-1:]).strategies] == ["gpusampler"]


@pytest.mark.parametrize("max_steps", [0, -1, 2.5, True])
def test_bad_number_of_steps(max_steps):
    with pytest.raises(ParameterError, match="max_steps"):
        GPUBatchRebalanceSampler(LENGTHS, 50, 2).report(max_steps=max_steps)


@pytest.mark.parametrize("lengths", [[3] * 64, LENGTHS.tolist(), list(range(1, 65))])
def test_picture(tmp_path, lengths):
    for extension in ("png", "svg"):
        path = tmp_path / f"report.{extension}"
        plot_report(report_sampler(GPUBatchRebalanceSampler(lengths, 32, 2, 2, max_tokens=40_000), caps=True), path)
        assert path.stat().st_size > 10_000
    assert (tmp_path / "report.png").read_bytes()[1:4] == b"PNG"


def test_picture_that_cannot_be_written(tmp_path, monkeypatch):
    with pytest.raises(ParameterError, match=r"plot must end in one of .*\.png.*, got 'report'"):
        check_plot("report")
    with pytest.raises(ParameterError, match="no such folder"):
        check_plot(tmp_path / "no" / "report.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ParameterError, match=r"pip install 'gpusampler\[report\]'"):
        check_plot("report.png")


@pytest.mark.parametrize(
    ("name", "count", "shortest", "longest"),
    [("alpaca_eval_rollouts", 176_295, 5, 8440), ("mooncake_conversation", 12_031, 895, 126_527)],
)
def test_traces(name, count, shortest, longest):
    lengths = load_trace(name)
    assert (lengths.dtype, lengths.shape) == (np.int32, (count,))
    assert (lengths.min(), lengths.max()) == (shortest, longest)
    assert name in TRACES


def test_unknown_trace():
    with pytest.raises(ParameterError, match="name must be one of 'alpaca_eval_rollouts'"):
        load_trace("alpaca")


def test_table_of_uneven_heads():
    assert as_table(["a", "one\ntwo"], [["xyz", "1"]]).split("\n") == ["     one", "a    two", "xyz    1"]
