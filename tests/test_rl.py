"""Micro-batches for RL: call shapes, exact values, the token budget, and equal counts over real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.partition import differencing
from gpusampler import CostModel
from gpusampler.errors import ParameterError
from gpusampler.rl import (
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    rearrange_micro_batches,
    restore_dynamic_batch,
)

PROGRAM = Path(__file__).parent / "dist_streaming" / "rl.py"
LINEAR = CostModel(alpha=0.0)


def rollouts(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Padded rows; `rewards` numbers the rows."""
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": mask * 7, "attention_mask": mask, "rewards": torch.arange(len(lengths)).float()}


def sums(lengths: Any, groups: list[list[int]]) -> list[int]:
    return [sum(int(lengths[i]) for i in group) for group in groups]


def test_partitions_computed_by_hand() -> None:
    # 5+5 | 4+3+3, equal sums: the group with the smallest position first
    assert get_seqlen_balanced_partitions([3, 5, 4, 3, 5], 2, False) == [[0, 2, 3], [1, 4]]
    # the costliest group first
    assert get_seqlen_balanced_partitions([1, 9, 2], 2, equal_size=False) == [[1], [0, 2]]
    assert get_seqlen_balanced_partitions([12, 3, 3, 3, 3, 3], 2, True) == [[0, 4, 5], [1, 2, 3]]
    assert get_seqlen_balanced_partitions(seqlen_list=[4], k_partitions=1, equal_size=True) == [[0]]


@pytest.mark.parametrize(
    "container",
    [list, tuple, np.array, torch.tensor, lambda x: np.array(x, np.int16), lambda x: torch.tensor(x).double()],
)
def test_L22_every_container_gives_the_same_builtin_ints(container: Any) -> None:
    groups = get_seqlen_balanced_partitions(container([3, 5, 4, 3, 5]), 2, False)
    assert groups == [[0, 2, 3], [1, 4]]
    assert all(type(i) is int for group in groups for i in group)


def test_workloads_far_above_32_bits() -> None:
    lengths = np.random.default_rng(0).integers(1, 32_768, 64)
    workload = [24576 * int(n) + int(n) ** 2 for n in lengths]
    groups = get_seqlen_balanced_partitions(workload, 8, equal_size=True)
    assert sorted(i for group in groups for i in group) == list(range(64))
    assert max(sums(workload, groups)) <= 1.01 * sum(workload) / 8


@pytest.mark.parametrize(
    ("values", "groups", "equal_size", "message"),
    [
        ([5, 0, 3], 2, False, r"seqlen_list\[1\] = 0"),
        ([5, 3, -2], 2, False, r"seqlen_list\[2\] = -2"),
        ([3.2, float("nan"), 1.5], 2, False, r"seqlen_list\[0\] = 3.2"),
        ([3.0, float("nan"), 1.0], 2, False, r"seqlen_list\[1\] = nan"),
        ([3, float("inf")], 2, False, r"seqlen_list\[1\] = inf"),
        ([3, None, 1], 2, False, "positive integer a sample"),
        ([True, False], 1, False, "positive integer a sample"),
        ([[1, 2]], 1, False, r"shape \(1, 2\)"),
        ([], 1, False, r"shape \(0,\)"),
        ([1 << 61, 1 << 61], 1, False, "sum of at most"),
        ([3, 1 << 62], 1, False, r"of at most 2\*\*61, got seqlen_list\[1\] = 4611686018427387904"),
        ([2, True], 1, False, r"one positive integer a sample, got seqlen_list\[1\] = True"),
        ([3, 1], 3, False, "k_partitions must be at most the number of samples, 2, got 3"),
        ([3, 1], 0, False, "k_partitions must be at least 1, got 0"),
        ([3, 1], True, False, "k_partitions must be an int"),
        ([3, 1, 2], 2, True, "got 3 samples for 2 groups"),
        ([3, 1], 2, "yes", "equal_size must be True or False"),
    ],
)
def test_L29_bad_values_are_named(values: Any, groups: Any, equal_size: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        get_seqlen_balanced_partitions(values, groups, equal_size)


@pytest.mark.parametrize("equal_size", [False, True])
def test_balance_at_least_that_of_karmarkar_karp(equal_size: bool) -> None:
    lengths = np.exp(np.random.default_rng(3).normal(6, 0.9, 512)).astype(int) + 1
    groups = get_seqlen_balanced_partitions(lengths, 64, equal_size)
    theirs = differencing(lengths.tolist(), 64, equal_size)
    assert max(sums(lengths, groups)) <= max(sums(lengths, theirs))


def test_micro_batches_computed_by_hand() -> None:
    # 17 tokens need 2 micro-batches of 10: 7+1 is 8, 5+4 is 9
    batch = rollouts([4, 7, 1, 5])
    parts, rows = rearrange_micro_batches(batch, 10, cost=LINEAR, use_dynamic_bsz_balance=False)
    assert rows == [[0, 3], [1, 2]]
    assert [part["rewards"].tolist() for part in parts] == [[0.0, 3.0], [1.0, 2.0]]
    assert parts[0]["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]]
    assert set(parts[0]) == set(batch)


def test_order_of_micro_batches() -> None:
    batch = rollouts([5, 9, 1, 7, 3])
    _, falling = rearrange_micro_batches(batch, 9, min_num_micro_batch=5, use_dynamic_bsz_balance=False)
    assert falling == [[1], [3], [0], [4], [2]]
    _, hill = rearrange_micro_batches(batch, 9, min_num_micro_batch=5)
    assert hill == [[2], [0], [1], [3], [4]]  # 1 5 9 7 3


def test_number_of_micro_batches() -> None:
    batch = rollouts([2] * 12)
    count = {  # 24 tokens
        24: len(rearrange_micro_batches(batch, 24)[0]),
        8: len(rearrange_micro_batches(batch, 8)[0]),
        7: len(rearrange_micro_batches(batch, 7)[0]),  # 3 rows each, 6 of 7 tokens
    }
    assert count == {24: 1, 8: 3, 7: 4}
    assert len(rearrange_micro_batches(batch, 8, num_batches_divided_by=2)[0]) == 4
    assert len(rearrange_micro_batches(batch, 8, min_num_micro_batch=5)[0]) == 5
    assert len(rearrange_micro_batches(batch, 8, num_batches_divided_by=4, min_num_micro_batch=5)[0]) == 8
    with pytest.raises(ParameterError, match=r"16 micro-batches are needed .* only 12 rows"):
        rearrange_micro_batches(batch, 8, num_batches_divided_by=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_token_len": 8}, "max_token_len=8 is below the length of row 1, 9"),
        ({"max_token_len": 0}, "max_token_len must be at least 1"),
        ({"lengths": torch.tensor([1, 2])}, "2 lengths, but field 'attention_mask' has 3 rows|2 lengths, but field"),
        ({"lengths": torch.tensor([1, 0, 2])}, r"lengths\[1\] = 0 is not positive"),
        ({"batch": {"x": torch.zeros(3)}}, "no attention_mask and no nested input_ids: give lengths; its fields"),
        ({"batch": [1, 2]}, "batch must be a mapping"),
        ({"batch": rollouts([5, 9, 2]) | {"t": 0.7}}, "field 't' has no rows, it is a float"),
        ({"batch": rollouts([5, 9, 2]) | {"uid": ["a"]}}, "field 'uid' has 1 rows"),
        ({"batch": {"attention_mask": torch.tensor([[1], [0]])}}, r"lengths of attention_mask\[1\] = 0"),
        ({"batch": {"attention_mask": torch.zeros(0, 4)}}, "batch is empty"),
        ({"batch": {"attention_mask": []}}, r"dense tensor \[rows, tokens\], got shape \(0,\)"),
        ({"batch": {"attention_mask": torch.ones(2, 1, 4, 4)}}, r"dense tensor .*, got shape \(2, 1, 4, 4\)"),
        ({"batch": {"attention_mask": "ab"}}, "attention_mask must be a tensor of rows, got str"),
        ({"batch": {"attention_mask": torch.tensor([[1, 1], [1, 2]])}}, "0 and 1 only, row 1 has other values"),
        ({"batch": {"attention_mask": torch.tensor([[0.0, -torch.inf]])}}, "0 and 1 only, row 0 has other values"),
        ({"batch": {"attention_mask": torch.tensor([[0.5, 1.5]])}}, "0 and 1 only, row 0 has other values"),
        ({"lengths": torch.zeros(0)}, "lengths is empty"),
        ({"lengths": torch.tensor([5, 9, 2**62])}, r"lengths\[2\] = 4611686018427387904 is over"),
        ({"cost": 3}, "cost must be a CostModel, got 3"),
        ({"max_token_len": 2**70}, "max_token_len must be at most 9223372036854775807"),
        ({"min_num_micro_batch": 2**70}, "min_num_micro_batch must be at most 2147483647"),
        ({"min_num_micro_batch": 0}, "min_num_micro_batch must be at least 1"),
        ({"num_batches_divided_by": 0}, "num_batches_divided_by must be at least 1"),
        ({"same_micro_num_in_dp": 1}, "same_micro_num_in_dp must be True or False"),
    ],
)
def test_bad_batches_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {"batch": rollouts([5, 9, 2]), "max_token_len": 9} | change
    with pytest.raises(ParameterError, match=message):
        rearrange_micro_batches(**arguments)


def test_kinds_of_batches_and_fields() -> None:
    lengths = [5, 2, 7, 1, 3, 3]
    nested = torch.nested.as_nested_tensor([torch.full((n,), n) for n in lengths], layout=torch.jagged)
    batch = UserDict(input_ids=nested, uid=list("abcdef"), score=np.arange(6) / 2)
    parts, rows = rearrange_micro_batches(batch, 10, cost=LINEAR, use_dynamic_bsz_balance=False)
    assert rows == [[0, 1], [2], [3, 4, 5]]
    assert [part["uid"] for part in parts] == [["a", "b"], ["c"], ["d", "e", "f"]]
    assert parts[2]["score"].tolist() == [1.5, 2.0, 2.5]
    assert [row.tolist() for row in parts[2]["input_ids"].unbind()] == [[1], [3, 3, 3], [3, 3, 3]]
    output = torch.nested.as_nested_tensor(
        [row for part in parts for row in part["input_ids"].unbind()], layout=torch.jagged
    )
    assert [len(row) for row in restore_dynamic_batch(output, rows).unbind()] == lengths


@pytest.mark.parametrize("container", [torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.bool, torch.Tensor.float])
def test_masks_of_other_types(container: Any) -> None:
    batch = rollouts([4, 7, 1, 5])
    changed = batch | {"attention_mask": container(batch["attention_mask"])}
    assert rearrange_micro_batches(changed, 10)[1] == rearrange_micro_batches(batch, 10)[1]


def test_tensordict() -> None:
    tensordict = pytest.importorskip("tensordict")
    nested = torch.nested.as_nested_tensor([torch.full((n,), n) for n in (5, 2, 7)], layout=torch.jagged)
    batch = tensordict.TensorDict({"input_ids": nested, "rewards": torch.arange(3)}, batch_size=[3])
    parts, rows = rearrange_micro_batches(batch, 7)
    assert rows == [[2], [0, 1]]
    assert [type(part) for part in parts] == [tensordict.TensorDict] * 2
    assert [part.batch_size for part in parts] == [torch.Size([1]), torch.Size([2])]
    assert parts[1]["rewards"].tolist() == [0, 1]
    assert parts[1]["input_ids"].offsets().tolist() == [0, 5, 7]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 200))
def test_budget_coverage_and_way_back(lengths: list[int], budget: int) -> None:
    batch = {"rewards": torch.arange(len(lengths)).float()}
    parts, rows = rearrange_micro_batches(batch, budget, lengths=torch.tensor(lengths))
    assert all(rows)
    assert max(sums(lengths, rows)) <= budget
    assert sorted(i for group in rows for i in group) == list(range(len(lengths)))
    assert [part["rewards"].tolist() for part in parts] == [[float(i) for i in group] for group in rows]
    together = torch.cat([part["rewards"] for part in parts])
    assert torch.equal(restore_dynamic_batch(together, rows), batch["rewards"])


def test_reverse_index() -> None:
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]
    assert get_reverse_idx([]) == []
    reverse = get_reverse_idx(torch.tensor([2, 0, 1], dtype=torch.int32))
    assert reverse.tolist() == [1, 2, 0]
    assert reverse.dtype == torch.int32
    given = [1, 0]
    get_reverse_idx(given)
    assert given == [1, 0]
    for bad, message in [([0, 0], r"idx_map\[1\] = 0 is also"), ([0, 2], "at most 1"), ([0, 1.5], "must be an int")]:
        with pytest.raises(ParameterError, match=message):
            get_reverse_idx(bad)
    for bad, message in [
        (torch.tensor([[0, 1]]), r"one-dimensional integer tensor, got shape \(1, 2\) of torch.int64"),
        (torch.tensor([1.0, 0.0]), r"one-dimensional integer tensor, got shape \(2,\) of torch.float32"),
        (torch.tensor([True, False]), "integer tensor, got .*bool"),
        (torch.tensor(0), r"got shape \(\)"),
        (np.array([[0, 1]]), r"idx_map\[0\] must be an int"),
        (5, "idx_map must be a sequence of ints, got 5"),
    ]:
        with pytest.raises(ParameterError, match=message):
            get_reverse_idx(bad)
    with pytest.raises(ParameterError, match="each of 0 to 1 once"):
        get_reverse_idx(torch.tensor([1, 1]))
    with pytest.raises(ParameterError, match="data has 3 rows, batch_idx_list 2"):
        restore_dynamic_batch(torch.zeros(3), [[0, 1]])


@pytest.mark.gpu
def test_cuda_tensors_stay_on_the_device() -> None:
    batch = {name: value.cuda() for name, value in rollouts([4, 7, 1, 5]).items()}
    parts, rows = rearrange_micro_batches(batch, 10)
    assert rows == rearrange_micro_batches(rollouts([4, 7, 1, 5]), 10)[1]
    assert {value.device.type for part in parts for value in part.values()} == {"cuda"}
    assert get_reverse_idx(torch.tensor([2, 0, 1], device="cuda")).device.type == "cuda"
    assert restore_dynamic_batch(torch.cat([part["rewards"] for part in parts]), rows).tolist() == [0, 1, 2, 3]


@pytest.mark.dist
@pytest.mark.timeout(150)
def test_L42_counts_are_equal_on_real_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    # alone: rank 0 has 16 rows of 100 in a budget of 400, rank 1 one of 400 and 15 of 10
    assert [run["alone"] for run in seen] == [4, 2]
    assert [run["together"] for run in seen] == [4, 4]
    assert [run["smallest"] for run in seen] == [4, 1]
    assert all(run["largest"] <= 400 for run in seen)
    # a ring of collectives, one a micro-batch, that ends on both
    assert [run["met"] for run in seen] == [8, 8]
    assert "row 0, 400" in seen[1]["own error"]
    assert "rank 1 cannot split its batch" in seen[0]["own error"]
    assert all("4 micro-batches are needed" in run["too few rows"] for run in seen)
    assert all("only 2 rows" in run["too few rows"] for run in seen)
    assert [run["subgroup"] for run in seen] == [4, 2]
    for name, own in seen[1]["one rank's parameter"].items():
        assert f"Error: {name} must be" in own
        assert seen[0]["one rank's parameter"][name] == f"ParameterError: rank 1 cannot split its batch. {own}"
    assert all(
        "num_batches_divided_by must be the same on all ranks, got 2 and 3" in r["other multiples"] for r in seen
    )
    assert [run["after errors"] for run in seen] == [4, 4]
    assert "DistributedError: a rank of dp_group did not come to rearrange_micro" in seen[0]["alone on one rank"]
    assert "same_micro_num_in_dp alike" in seen[0]["alone on one rank"]
    assert seen[1]["alone on one rank"] == ""
