"""Cost models from measured times: published fits, synthetic times with known constants, times of this machine."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpusampler import CostModel, GPUBatchRebalanceSampler, measure_cli
from gpusampler.alpha_price import price_alphas, price_table
from gpusampler.calibrate import fit_cost
from gpusampler.demo_model import VOCABULARY, TinyTransformer
from gpusampler.errors import ParameterError, ParameterTypeError
from gpusampler.regression import nonnegative_least_squares, robust_fit, t_quantile
from gpusampler.traces import load_trace

DATA = Path(__file__).parent / "data"
FITS: list[dict[str, Any]] = json.loads((DATA / "measured_fits.json").read_text())["fits"]
GROUP = ("gpu", "model", "precision", "act_ckpt", "sharding", "n_gpus")
SHAPES = [(n, length) for n in (1, 3, 9) for length in (100, 700, 3000)]


def measured(fit: dict[str, Any]) -> list[tuple[float, float, float]]:
    with (DATA / "measured_steps.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if all(row[name] == str(fit[name]) for name in GROUP)]
    return [(float(row["micro_batch"]), float(row["seq_len"]), float(row["micro_step_s"])) for row in rows]


def synthetic(
    count: int, noise: float, seed: int, alpha: float = 1e-4, intercept: float = 1000.0, token: float = 1e-5
) -> np.ndarray[Any, np.dtype[np.float64]]:
    random = np.random.default_rng(seed)
    length = np.exp(random.uniform(np.log(64), np.log(8192), count)).astype(int)
    samples = np.maximum(1, (random.uniform(0.05, 1, count) * 32768 / length).astype(int))
    seconds = token * (intercept + samples * (length + alpha * length**2)) * np.exp(random.normal(0, noise, count))
    return np.stack([samples, length, seconds], axis=1)


def times(alpha: float, intercept: float, token: float, shapes: Any = SHAPES) -> list[tuple[int, int, float]]:
    return [(n, length, token * (intercept + n * (length + alpha * length**2))) for n, length in shapes]


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: f"{fit['gpu']}-{fit['model']}")
def test_measured_training_reproduces_the_published_fits(fit: dict[str, Any]) -> None:
    records = measured(fit)
    assert len(records) == fit["n_points"]
    found = fit_cost(records)
    assert found.kept.all()
    assert found.model.intercept == 0.0
    assert found.seconds_per_token.value == pytest.approx(fit["b_s_per_token"], rel=1e-9)
    assert found.seconds_per_token2.value == pytest.approx(fit["c_s_per_token2"], rel=1e-9)
    assert 1 / found.model.alpha == pytest.approx(fit["L0_tokens_quad_equals_linear"], rel=1e-9)
    assert round(float(np.abs(found.errors).mean()), 4) == fit["rel_err_mean"]
    assert round(float(np.abs(found.errors).max()), 4) == fit["rel_err_max"]
    assert found.alpha.low <= found.alpha.value <= found.alpha.high


@settings(max_examples=40, deadline=None)
@given(
    alpha=st.floats(1e-6, 1e-2),
    intercept=st.one_of(st.just(0.0), st.floats(10.0, 1e5)),
    token=st.floats(1e-8, 1e-2),
)
def test_exact_times_give_exact_constants(alpha: float, intercept: float, token: float) -> None:
    found = fit_cost(times(alpha, intercept, token))
    assert found.model.alpha == pytest.approx(alpha, rel=1e-5)
    assert found.model.intercept == pytest.approx(intercept, rel=1e-4, abs=1e-4)
    assert found.seconds(5, 800) == pytest.approx(token * (intercept + 5 * (800 + alpha * 800**2)), rel=1e-6)


@pytest.mark.parametrize(("count", "noise"), [(12, 0.01), (40, 0.05), (300, 0.03)])
@pytest.mark.parametrize("intercept", [0.0, 300.0, 1000.0])
def test_noisy_times_are_recovered_within_the_stated_uncertainty(count: int, noise: float, intercept: float) -> None:
    trials = 30
    inside = np.zeros(3)
    for seed in range(trials):
        found = fit_cost(synthetic(count, noise, seed, intercept=intercept))
        pairs = ((found.alpha, 1e-4), (found.intercept, intercept), (found.seconds_per_token, 1e-5))
        inside += [estimate.low <= true <= estimate.high for estimate, true in pairs]
    # of 30 intervals that hold 95 %, fewer than 25 hold the truth in 1 of 600 cases
    assert (inside >= 25).all(), inside
    assert found.alpha.error < 0.5 * 1e-4
    if count >= 40:
        assert found.sigma == pytest.approx(noise, rel=0.4)


def test_intervals_shrink_with_the_number_of_records() -> None:
    few, many = (fit_cost(synthetic(count, 0.03, seed=1)).alpha for count in (20, 2000))
    assert many.high - many.low < 0.25 * (few.high - few.low)


def test_warm_up_and_slow_steps_are_left_out() -> None:
    records = synthetic(120, 0.01, seed=3)
    clean = fit_cost(records)
    spoiled = records.copy()
    spoiled[:6, 2] *= 30.0  # compilation
    spoiled[20::12, 2] *= 3.0  # a step that waited
    spoiled[50, 2] *= 0.02  # a broken clock
    found = fit_cost(spoiled)
    assert np.flatnonzero(~found.kept).tolist() == sorted({*range(6), *range(20, 120, 12), 50})
    assert found.alpha.value == pytest.approx(clean.alpha.value, rel=0.02)
    assert "left out as outliers: records 0, 1, 2, 3, 4, 5, 20, 32, ..." in found.notes


def test_records_as_array_tensor_generator_or_rows_are_the_same() -> None:
    rows = times(1e-4, 300.0, 1e-5)
    expected = fit_cost(rows).model
    for records in (np.array(rows), torch.tensor(rows, dtype=torch.float64), iter(rows), np.array(rows, dtype=object)):
        assert fit_cost(records).model == expected


def test_one_number_of_tokens_leaves_the_intercept_untold() -> None:
    shapes = [(32, 256), (16, 512), (8, 1024), (4, 2048), (2, 4096)]
    found = fit_cost(times(1e-4, 0.0, 1e-5, shapes))
    assert found.model.alpha == pytest.approx(1e-4)
    assert any("cannot be told" in note for note in found.notes)
    assert found.intercept.value == 0.0
    assert found.intercept.high > 8192  # it could be all of the linear time
    with pytest.raises(ParameterError, match="do not tell the intercept"):
        fit_cost(times(1e-4, 0.0, 1e-5, shapes), intercept=True)


def test_intercept_on_request() -> None:
    rows = synthetic(40, 0.02, seed=5, intercept=800.0)
    assert fit_cost(rows, intercept=False).model.intercept == 0.0
    assert fit_cost(rows, intercept=True).model.intercept == pytest.approx(800.0, rel=0.3)


def test_times_without_a_linear_or_a_quadratic_part_give_a_usable_model() -> None:
    linear = fit_cost(times(0.0, 50.0, 1e-5))
    assert linear.model.alpha == pytest.approx(0.0, abs=1e-12)
    quadratic = fit_cost([(n, length, 1e-9 * n * length**2) for n, length in SHAPES])
    assert quadratic.model.alpha == pytest.approx(10.0)  # 1000 over the shortest length, 100
    assert any("not told from 0: time grows with the squared length" in note for note in quadratic.notes)
    lengths = torch.tensor([100, 3000])
    ratio = quadratic.model(lengths)[1] / quadratic.model(lengths)[0]
    assert float(ratio) == pytest.approx(900.0, rel=0.002)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([(8, 512, 1.0)] * 10, r"got 10 records of 1 \(8 x 512\): time a few steps of at least 4 shapes"),
        (
            [(8, 512, 1.0), (8, 1024, 2.0)] * 4,
            r"at least 3 distinct shapes .* got 8 records of 2 \(8 x 512, 8 x 1024\)",
        ),
        ([(8, 512, 1.0), (8, 1024, 2.0), (4, 64, 0.1)], "in at least 4 records, got 3 records of 3"),
        ([(n, 512, n * 1.0) for n in range(1, 9)], r"lengths at least 1.5 times apart .* got 512 to 512: time a few"),
        ([(n, 500 + n, n * 1.0) for n in range(1, 9)], "got 501 to 508"),
        ([(n, 1000 * n, 1.0 / n**4) for n in range(1, 9)], "times that grow with samples"),
        ([], r"must be \[n, 3\] numbers \(samples, length, seconds\), got none"),
        ([(1, 2)] * 4, r"got shape \(4, 2\)"),
        ([(1, 2, 3.0), (1, 2)], "got"),
        ([(1, 2, "x")] * 4, "of numbers, got values of str"),
        ([(8, 512, 1.0), (8, 0, 1.0)], r"records\[1, 1\] \(length\) must be a whole number of at least 1, got 0.0"),
        ([(1.5, 512, 1.0)], r"records\[0, 0\] \(samples\) must be a whole number of at least 1, got 1.5"),
        ([(8, 512, math.nan)], r"records\[0, 2\] \(seconds\) must be a number from 1e-15 to 1e\+18, got nan"),
        ([(8, 512, -1.0)], r"records\[0, 2\].* got -1.0"),
        ([(8, 512, math.inf)], r"records\[0, 2\].* got inf"),
        ([(8, 512, 10**400)], "too large to convert"),
        ([("8", "512", "1.0")] * 4, "of numbers, got values of str"),
        (np.ones((4, 3), dtype=complex), "of numbers, got values of complex128"),
        (np.ones((4, 3), dtype=bool), "of numbers, got values of bool"),
        (np.zeros((4, 3), dtype="M8[s]"), "of numbers, got values of datetime64"),
        (np.ma.masked_array(np.ones((4, 3)), mask=np.eye(4, 3)), r"records\[0, 0\] .* got nan"),
        (torch.ones(4, 3).to_sparse(), "must be a dense tensor with values"),
        (torch.ones(4, 3, device="meta"), "must be a dense tensor with values"),
    ],
)
def test_bad_records_are_refused_with_index_and_value(records: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        fit_cost(records)


@pytest.mark.parametrize(("noise", "intercept"), [(0.0, None), (0.02, None), (0.02, True), (0.3, None)])
def test_times_that_do_not_grow_are_refused(noise: float, intercept: bool | None) -> None:
    random = np.random.default_rng(0)
    equal = [(n, length, 1.0 + noise * random.random()) for n, length, _ in times(1e-4, 0.0, 1e-5) * 4]
    with pytest.raises(ParameterError, match="times that grow with samples"):
        fit_cost(equal, intercept=intercept)


def test_records_of_several_machines_are_told_from_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ParameterError, match="of one model on one machine"):
        run("calibrate", str(DATA / "measured_steps.csv"))


@pytest.mark.parametrize("records", ["file.csv", None, 7])
def test_records_of_a_wrong_type(records: Any) -> None:
    with pytest.raises(ParameterTypeError, match="records must be"):
        fit_cost(records)


def test_price_of_alpha_by_hand() -> None:
    # Two ranks share [8, 4, 4]: alone 8, and 4 + 4, at any alpha; true cost of both groups at alpha 1/4: 24 and 16.
    sampler = GPUBatchRebalanceSampler([8, 4, 4], 3, dp_size=2, rank=0, shuffle=False, process_group=None)
    prices = price_alphas(sampler, CostModel(alpha=0.25), alphas=[0.0])
    assert [price.alpha for price in prices] == [0.0, 0.25]
    assert [price.relative for price in prices] == [1.0, 1.0]
    assert [price.idle for price in prices] == [pytest.approx(1 - 20 / 24)] * 2
    # [6, 5, 5, 5, 5]: at alpha 0 best as 6 5 | 5 5 5 (12 | 15); at alpha 1, 42 a sample of 6, 30 of 5: 84 | 90 as well
    # as 42 | 120, so that the plan of alpha 0 is the best one, too
    other = GPUBatchRebalanceSampler([6, 5, 5, 5, 5], 5, dp_size=2, rank=0, shuffle=False, process_group=None)
    assert [price.relative for price in price_alphas(other, CostModel(alpha=1.0), alphas=[0.0])] == [1.0, 1.0]


def test_wrong_alpha_is_dear_on_a_real_trace() -> None:
    sampler = GPUBatchRebalanceSampler(
        load_trace("mooncake_conversation"), 512, dp_size=8, grad_accum=4, rank=0, process_group=None
    )
    prices = price_alphas(sampler, CostModel(alpha=1e-4), alphas=[1e-3, 1e-4], max_steps=6)
    right, wrong = prices
    assert right.relative == 1.0
    assert 1.1 < wrong.relative < 2.6
    assert wrong.idle > right.idle
    assert "0.0001 (measured)" in price_table(prices, CostModel(alpha=1e-4))


def test_nonnegative_least_squares_against_a_grid() -> None:
    random = np.random.default_rng(0)
    grid = np.array(list(itertools.product(np.linspace(0, 2, 41), repeat=2)))
    for _ in range(30):
        design, target = random.normal(size=(8, 2)), random.normal(size=8)
        found = nonnegative_least_squares(design, target)
        assert (found >= 0).all()
        best = np.square(grid @ design.T - target).sum(axis=1).min()
        assert np.square(design @ found - target).sum() <= best + 1e-9


def test_quantiles_of_students_t() -> None:
    # tables of the distribution
    for probability, freedom, value in ((0.975, 1, 12.706), (0.995, 2, 9.925), (0.975, 3, 3.182), (0.995, 9, 3.250)):
        assert t_quantile(probability, freedom) == pytest.approx(value, rel=0.005)


def test_coefficients_that_cannot_be_told_apart_have_no_finite_condition() -> None:
    column = np.arange(1.0, 7.0)
    assert robust_fit(np.stack([column, 2 * column], axis=1), column).condition > 1e12


def timed(model: nn.Module, shapes: list[tuple[int, int]], rounds: int) -> dict[tuple[int, int], float]:
    """Least CPU time of a training step of each shape: other processes share the cores."""
    best = dict.fromkeys(shapes, math.inf)
    for _, (samples, length) in itertools.product(range(rounds), shapes):
        tokens = torch.randint(VOCABULARY, (samples, length))
        begun = time.thread_time()
        scores = model(tokens)
        nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()).backward()
        best[samples, length] = min(best[samples, length], time.thread_time() - begun)
    return best


def test_times_of_this_cpu_predict_held_out_shapes() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seen = [(n, length) for length in (64, 160, 400, 1000) for n in (1, 2, 4)]
    held_out = [(3, 96), (4, 128), (2, 240), (3, 320), (1, 600), (3, 720), (2, 900)]
    try:
        torch.manual_seed(0)
        model = TinyTransformer(hidden_size=64, num_layers=2, num_heads=2, longest=1000)
        best = timed(model, seen + held_out, rounds=6)
    finally:
        torch.set_num_threads(threads)
    found = fit_cost([(*shape, best[shape]) for shape in seen])
    errors = [abs(1 - found.seconds(*shape) / best[shape]) for shape in held_out]
    assert float(np.median(errors)) < 0.10, (errors, found.table())


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    measure_cli.register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(argv)
    code: int = arguments.func(arguments)
    return code


CHOICE = [
    "--where=gpu=h100_80gb",
    "--where=model=7b",
    "--where=n_gpus=8",
    "--where=act_ckpt=True",
    "--where=precision=amp_bf16",
]


def test_command_on_the_measured_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, load_trace("mooncake_conversation")[:2000])))
    training = ["--lengths", str(lengths), "--batch-size", "256", "--dp-size", "4", "--steps", "3"]
    assert run("calibrate", str(DATA / "measured_steps.csv"), *CHOICE, *training) == 0
    text = capsys.readouterr().out
    assert "alpha      7.05e-05 (" in text
    assert "7.05e-05 (measured)" in text
    assert "cost=CostModel(alpha=7.04953e-05, intercept=0)" in text
    assert run("calibrate", str(DATA / "measured_steps.csv"), *CHOICE, *training, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["alpha"]["value"] == pytest.approx(1 / 14185.352617080205)
    assert [price["relative"] for price in report["prices"]][2] == 1.0


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json", ".npy"])
@pytest.mark.parametrize("named", [True, False])
def test_formats_of_records(suffix: str, named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = times(1e-4, 0.0, 1e-5)
    path = tmp_path / f"records{suffix}"
    names = ("samples", "length", "seconds")
    if suffix == ".npy":
        np.save(path, np.array(rows))
    elif suffix in (".csv", ".tsv"):
        lines = ([names] if named else []) + rows
        path.write_text("\n".join(("," if suffix == ".csv" else "\t").join(map(str, line)) for line in lines))
    else:
        items = [dict(zip(names, row, strict=True)) if named else list(row) for row in rows]
        path.write_text(json.dumps(items) if suffix == ".json" else "\n".join(map(json.dumps, items)))
    assert run("calibrate", str(path), "--no-intercept", "--json") == 0
    assert json.loads(capsys.readouterr().out)["alpha"]["value"] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "samples,length\n1,2\n", "must have the columns samples, length, seconds, it has"),
        ("a.csv", "samples,length,seconds\n1,2,x\n", "record 0: 'x' is not a number"),
        ("a.csv", "", "got none"),
        ("a.txt", "1 2 3", "must end in"),
        ("a.json", "{}", "must hold a list"),
        ("a.json", "{", "cannot be read"),
        ("a.jsonl", "[1, 2, 3]\n{", "cannot be read"),
        ("a.npy", "no array", "cannot be read"),
        ("a.csv", "samples,length,seconds\n1,2,3\n4\n", "record 1 has 1 cells, and there are 3 columns: .'4'."),
        ("a.csv", "samples,length,seconds\n1,2,3,4\n", "record 0 has 4 cells"),
        ("a.csv", "samples,length,seconds,length\n1,2,3,4\n", "two of its columns have one name"),
        ("a.csv", f"samples,length,seconds\n1,2,{'9' * 200_000}\n", "cannot be read: field larger than"),
        ("a.csv.gz", "\x1f", "must end in .csv, .tsv, .jsonl, .json or .npy"),
        ("a.json", "[1, 2, 3]", "record 0: it must be a list of numbers, got 1"),
        ("a.json", "[[1, 2, 3], 4]", "record 1: it must be a list of numbers, got 4"),
        ("a.json", "[[1, 2, [3]]]", r"record 0: \[3\] is not a number"),
        ("a.json", "[[1, 2, true]]", "record 0: True is not a number"),
        ("a.json", f"[[1, 2, 1{'0' * 400}]]", "record 0: 10+\\.\\.\\. is not a number"),
        ("a.json", "[" * 100_000, "cannot be read: maximum recursion"),
        ("a.json", '[{"samples": 1, "length": 2, "seconds": 3}, 5]', "record 1: it must have names of columns"),
        ("a.json", '[{"samples": 1, "length": 2, "seconds": 3}, {}]', "record 1: it has no 'samples'"),
    ],
)
def test_bad_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ParameterError, match=message):
        run("calibrate", str(path))


@pytest.mark.parametrize("shape", [(), (5,), (2, 2, 2)])
def test_arrays_of_another_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(shape))
    with pytest.raises(ParameterError, match=r"its array must be \[n, columns\], it has the shape"):
        run("calibrate", str(tmp_path / "a.npy"))


def test_spaces_and_other_line_ends_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.csv"
    lines = [
        "\ufeffsamples, length , seconds",
        *(f" {n}, {length}, {took} " for n, length, took in times(1e-4, 0.0, 1e-5)),
    ]
    path.write_bytes("\r\n".join(lines).encode())
    assert run("calibrate", str(path), "--no-intercept", "--json") == 0
    assert json.loads(capsys.readouterr().out)["alpha"]["value"] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--where", "gpu"], "--where must be COLUMN=VALUE"),
        (["--where", "gpu=tpu"], "no rows with gpu=tpu"),
        (["--where", "price=1"], "no column 'price'"),
        ([*CHOICE, "--lengths", "x.txt"], "--lengths needs --batch-size"),
    ],
)
def test_bad_arguments(argv: list[str], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        run("calibrate", str(DATA / "measured_steps.csv"), *argv)
