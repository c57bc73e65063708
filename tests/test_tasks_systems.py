"""Systems in a group: the `auto_prob` and `sys_probs` forms."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusampler.errors import ParameterError
from gpusampler.tasks import Source, SystemGroup, Task, resolve_task_schedule, system_probabilities

F = Fraction


@pytest.mark.parametrize(
    ("sizes", "auto_prob", "expected"),
    [
        ([2, 1, 3], "prob_uniform", [F(1, 3)] * 3),
        ([2, 1, 3], "prob_sys_size", [F(1, 3), F(1, 6), F(1, 2)]),
        ([2, 1, 3], "prob_sys_size;0:3:1.0", [F(1, 3), F(1, 6), F(1, 2)]),
        ([2, 1, 3], "prob_sys_size;0:1:0.5;1:3:0.5", [F(1, 2), F(1, 8), F(3, 8)]),
        ([2, 1, 3], "prob_sys_size;0:1:3;1:3:1", [F(3, 4), F(1, 16), F(3, 16)]),  # weights are normalised
        ([2, 1, 3], "prob_sys_size;1:3:0.2", [0, F(1, 4), F(3, 4)]),  # outside every block: never
        ([2, 1, 3], "prob_sys_size; 0:1:0 ; 1:3:2", [0, F(1, 4), F(3, 4)]),
        ([0, 1, 3], "prob_sys_size", [0, F(1, 4), F(3, 4)]),
    ],
)
def test_auto_prob_by_hand(sizes, auto_prob, expected):
    assert list(system_probabilities(sizes, auto_prob)) == expected


@pytest.mark.parametrize(
    ("sizes", "sys_probs", "expected"),
    [
        ([2, 1, 3], [0.5, 0.25, 0.25], [F(1, 2), F(1, 4), F(1, 4)]),
        ([2, 1, 3], [0.5, -1, -1], [F(1, 2), F(1, 8), F(3, 8)]),
        ([2, 1, 3], [-1, -0.3, -5.0], [F(1, 3), F(1, 6), F(1, 2)]),
        ([2, 1, 3], [0, -1, 0.5], [0, F(1, 2), F(1, 2)]),
        ([2, 1], [0.1 + 0.2, 0.7], [F(0.1 + 0.2) / (F(0.1 + 0.2) + F(0.7)), F(0.7) / (F(0.1 + 0.2) + F(0.7))]),
    ],
)
def test_sys_probs_by_hand(sizes, sys_probs, expected):
    assert list(system_probabilities(sizes, "prob_uniform", sys_probs)) == expected


@pytest.mark.parametrize(
    ("sizes", "auto_prob", "message"),
    [
        ([1, 1], "prob_size", "auto_prob must be"),
        ([1, 1], "prob_uniform;0:1:1", "auto_prob must be"),
        ([1, 1], None, "auto_prob must be"),
        ([1, 1], "prob_sys_size;", "block 0 must read start:end:weight, got ''"),
        ([1, 1], "prob_sys_size;0:1", "block 0 must read"),
        ([1, 1], "prob_sys_size;0:1:0.5;x:2:0.5", "block 1 must read"),
        ([1, 1], "prob_sys_size;0:3:1", "block 0 must have 0 <= start < end <= 2, got '0:3:1'"),
        ([1, 1], "prob_sys_size;-1:2:1", "block 0 must have"),
        ([1, 1], "prob_sys_size;1:1:1", "block 0 must have"),
        ([1, 1], "prob_sys_size;0:1:-1;1:2:2", "weight of auto_prob block 0 must be at least 0.0, got -1.0"),
        ([1, 1], "prob_sys_size;0:1:nan;1:2:2", "weight of auto_prob block 0 must be finite"),
        ([1, 1], "prob_sys_size;0:1:0;1:2:0", "block weights of auto_prob .* must have a positive sum"),
        ([1, 1], "prob_sys_size;0:2:1;1:2:1", "blocks 0 and 1 .* both hold system 1"),
        ([0, 1], "prob_sys_size;0:1:1;1:2:1", "block 0 .* has weight and no batches"),
        ([0, 0], "prob_sys_size", "batches of the systems must have a positive sum"),
        ([], "prob_uniform", "systems must not be empty"),
    ],
)
def test_bad_auto_prob_raises(sizes, auto_prob, message):
    with pytest.raises(ValueError, match=message):
        system_probabilities(sizes, auto_prob)


@pytest.mark.parametrize(
    ("sys_probs", "message"),
    [
        ([0.5, 0.5], "one entry for each of the 3 systems, got 2"),
        ([0.5, 0.4, 0.0], "must sum to 1"),
        ([0.9, 0.9, -1], "must sum to at most 1, got 1.8"),
        ([0.5, 0.5, -1], "leave nothing for the others"),
        ([math.nan, 0.5, 0.5], r"sys_probs\[0\] must be finite"),
        ([True, 0, 0], r"sys_probs\[0\] must be a number"),
    ],
)
def test_bad_sys_probs_raise(sys_probs, message):
    with pytest.raises(ValueError, match=message):
        system_probabilities([1, 2, 3], sys_probs=sys_probs)


def test_a_system_that_is_drawn_and_empty_raises_by_name():
    with pytest.raises(ValueError, match=r"system 1 is drawn with probability 0\.5 and has 0 batches"):
        len(SystemGroup([3, 0], "prob_uniform"))
    with pytest.raises(ValueError, match="left is drawn"):
        len(SystemGroup([0, 3], "prob_uniform", names=["left", "right"]))
    with pytest.raises(ValueError, match="source 1 of task 't': system 1 is drawn"):
        resolve_task_schedule([Task("t", [3, SystemGroup([3, 0], "prob_uniform")])], num_steps=1)
    with pytest.raises(ValueError, match="systems must be a list, got 3"):
        SystemGroup(3)
    with pytest.raises(ValueError, match=r"names\[1\] must be a string, got 3"):
        SystemGroup([1, 2], names=["a", 3])
    with pytest.raises(ValueError, match="names must have one entry"):
        SystemGroup([3, 1], names=["left"])


def test_nominal_epoch_of_a_group_enters_its_task():
    group = SystemGroup([2, 1, 3], "prob_sys_size;0:1:0.5;1:3:0.5")  # max(2 / 0.5, 1 / 0.125, 3 / 0.375) = 8
    assert len(group) == 8
    assert group.probabilities == [0.5, 0.125, 0.375]
    task = Task("t", [Source(group, prob=0.25), Source(3, prob=0.75)])  # max(8 / 0.25, 3 / 0.75) = 32
    assert resolve_task_schedule([task], policy="epoch", num_steps=1).epoch_lengths == {"t": 32}


def test_systems_are_drawn_with_their_probabilities_and_never_at_zero():
    group = SystemGroup([2, 5, 1, 3], "prob_sys_size;0:1:0.5;2:4:0.5")
    counts = Counter(group.system_at(step, seed=4) for step in range(8000))
    assert counts.keys() == {0, 2, 3}
    expected = {0: 4000, 2: 1000, 3: 3000}
    assert sum((counts[s] - n) ** 2 / n for s, n in expected.items()) < 13.82


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_blocks_hold_their_weights(sizes, data):
    cut = data.draw(st.integers(0, len(sizes) - 1))
    blocks = [f"0:{cut}:3"] * bool(cut) + [f"{cut}:{len(sizes)}:1"]
    p = system_probabilities(sizes, ";".join(["prob_sys_size", *blocks]))
    assert sum(p) == 1
    assert sum(p[:cut]) == (F(3, 4) if cut else 0)
    assert all(p[i] * sizes[j] == p[j] * sizes[i] for i in range(cut) for j in range(cut))


def test_arrays_and_generators_are_lists_too():
    assert system_probabilities(np.array([2, 1, 3])) == (F(1, 3), F(1, 6), F(1, 2))
    assert SystemGroup(iter([2, 1]), sys_probs=(p for p in (0.5, 0.5))).exact == (F(1, 2), F(1, 2))
    assert SystemGroup(np.array([2, 1]), sys_probs=np.array([0.25, -1])).exact == (F(1, 4), F(3, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SystemGroup([1, 2], sys_probs=5), "sys_probs must be a list, got 5"),
        (lambda: SystemGroup([1, 2], sys_probs={0.5, 0.25}), "sys_probs must be a list"),
        (lambda: SystemGroup([1, 2], sys_probs="ab"), "sys_probs must be a list, got 'ab'"),
        (lambda: SystemGroup([1, 2], sys_probs=np.array(1.0)), "sys_probs must be a list"),
        (lambda: SystemGroup([1, -2]), "batches of system 1 must be at least 0, got -2"),
        (lambda: SystemGroup([1, lambda: -2]).num_steps, "callable of system 1 returns must be at least 0, got -2"),
        (lambda: SystemGroup([1, lambda: 2.0]).num_steps, "callable of system 1 returns must be an int, got 2.0"),
        (lambda: system_probabilities([3, -1]), r"sizes\[1\] must be at least 0, got -1"),
        (lambda: system_probabilities(np.array([3.0, 1.0])), r"sizes\[0\] must be an int"),
        (lambda: system_probabilities(None), "sizes must be a list, got None"),
        (lambda: system_probabilities([1, 1], sys_probs=[10**400, 0]), r"sys_probs\[0\] must be at most 1.8e308"),
        (lambda: system_probabilities([1, 1], "prob_sys_size;0:1" + "0" * 5000 + ":1"), "block 0 must read"),
    ],
)
def test_hostile_groups_raise_with_their_name(make, message):
    with pytest.raises(ParameterError, match=message):
        make()
