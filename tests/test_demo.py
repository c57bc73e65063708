"""The demo: its parts by hand, and one real run under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from gpusampler import CostModel
from gpusampler.demo import DEMO_STRATEGIES, DemoError, _train
from gpusampler.demo_model import IGNORED, VOCABULARY, CountingData, TinyTransformer, pad
from gpusampler.demo_worker import DemoSettings, choose_steps, demo_lengths, demo_sampler, fit_cost
from gpusampler.traces import load_trace

SETTINGS = DemoSettings(
    trace="alpaca_eval_rollouts", mean_length=64, longest=1024, dp_size=2, grad_accum=4, batch_size=64, hidden_size=192,
    num_layers=2, num_heads=3, strategies=DEMO_STRATEGIES, num_steps=None, seconds=10.0, seed=42, device="cpu",
)  # fmt: skip
SMALL = {"mean_length": 24, "longest": 128, "hidden_size": 32, "num_layers": 1, "num_heads": 2}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other on busy cores make tiny operations slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_model():
    torch.manual_seed(0)
    return TinyTransformer(hidden_size=16, num_layers=2, num_heads=2, longest=32)


def test_padding_changes_neither_scores_nor_loss():
    model, data = small_model(), CountingData(np.array([5, 12, 9]), seed=1)
    sequences = [data[i] for i in range(3)]
    tokens, targets = pad(sequences)
    assert tokens.shape == targets.shape == (3, 12)
    assert targets[0].tolist() == [*sequences[0][1:].tolist(), *[IGNORED] * 8]
    scores = model(tokens)
    assert scores.shape == (3, 12, VOCABULARY)
    alone = [model(each[None])[0] for each in sequences]
    for i, each in enumerate(sequences):
        torch.testing.assert_close(scores[i, : len(each)], alone[i])
    together = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    apart = [
        functional.cross_entropy(a[:-1], each[1:], reduction="sum") for a, each in zip(alone, sequences, strict=True)
    ]
    torch.testing.assert_close(together, sum(apart) / (5 + 12 + 9 - 3))


def test_model_is_causal():
    model = small_model()
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6] = 99
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :6], after[0, :6])
    assert not torch.equal(before[0, 6:], after[0, 6:])


def test_sequences_count_up_and_are_the_same_again():
    data = CountingData(np.array([200, 200]), seed=3)
    assert torch.equal(data[1], CountingData(np.array([200, 200]), seed=3)[1])
    assert not torch.equal(data[0], data[1])
    steps = data[0].diff() % VOCABULARY
    assert (steps == steps.mode().values).float().mean() > 0.7
    assert 1 <= steps.mode().values <= 7


@pytest.mark.parametrize("fit", [(0.5, 0.01, 1e-4), (0.0, 0.01, 1e-4), (0.5, 0.01, 0.0), (0.0, 0.02, 0.0)])
def test_fit_finds_the_terms(fit):
    shapes = [(1, 10), (4, 10), (1, 100), (3, 50), (2, 200)]
    seconds = [fit[0] + fit[1] * n * length + fit[2] * n * length**2 for n, length in shapes]
    assert fit_cost(shapes, seconds) == pytest.approx(fit, rel=1e-6, abs=1e-9)


def test_fit_has_no_negative_terms():
    shapes = [(1, 10), (4, 10), (1, 100), (3, 50), (2, 200)]
    falling = [0.1 * (n * length) ** 0.5 for n, length in shapes]
    fixed, linear, square = fit_cost(shapes, falling)
    assert fixed > 0
    assert linear > 0
    assert square == 0.0
    rising = [1e-6 * (n * length) ** 2 for n, length in shapes]
    fixed, linear, square = fit_cost(shapes, rising)
    assert min(fixed, square) >= 0
    assert linear > 0


def test_lengths_are_those_of_the_trace_scaled_down():
    lengths = demo_lengths(SETTINGS, 500)
    trace = load_trace("alpaca_eval_rollouts")
    assert lengths.shape == (500 * 64,)
    assert 2 <= lengths.min() <= lengths.max() <= 1024
    assert lengths.mean() == pytest.approx(64, rel=0.02)
    assert np.median(lengths) / lengths.mean() == pytest.approx(np.median(trace) / trace.mean(), rel=0.05)


def test_steps_fill_the_time_that_is_given():
    cost = CostModel(alpha=5e-4, intercept=100.0)
    few, many = (choose_steps(replace(SETTINGS, seconds=seconds), cost, 1e-4) for seconds in (40.0, 80.0))
    assert 8 < few < many
    assert abs(many - 2 * few) <= 1
    assert choose_steps(SETTINGS, cost, 1.0) == 8
    assert choose_steps(replace(SETTINGS, num_steps=3), cost, 1.0) == 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    program = (
        f"import sys; from gpusampler import cli, demo; demo._CPU_SIZES.update({SMALL}); "
        f"sys.exit(cli.main(['demo', '--output', {str(folder / 'out')!r}, '--steps', '3']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder / "out", done


@pytest.mark.dist
@pytest.mark.slow
def test_demo_trains_with_every_strategy(run):
    folder, done = run
    results = json.loads((folder / "results.json").read_text())
    assert [each["name"] for each in results["runs"]] == list(DEMO_STRATEGIES)
    for each in results["runs"]:
        assert len(each["step_seconds"]) == len(each["losses"]) == len(each["modelled_step_seconds"]) == 3
        assert each["tokens_per_second"] > 0
        assert each["losses"][-1] < each["losses"][0]
    ours = results["runs"][-1]
    assert ours["relative_time_measured"] == ours["modelled"]["relative_cost"] == 1.0
    assert (folder / "demo.png").read_bytes()[1:4] == b"PNG"
    assert "tokens/s" in done.stdout
    assert "3 steps of 64 samples with each, 2 processes x 4 micro-batches" in done.stdout
    assert "training" in done.stderr
    assert "12/12" in done.stderr


@pytest.mark.dist
@pytest.mark.slow
def test_L18_demo_losses_are_the_mean_over_the_global_batch(run):
    folder, _ = run
    runs = {each["name"]: each for each in json.loads((folder / "results.json").read_text())["runs"]}
    for name in ("random", "transformers"):
        assert runs[name]["losses"] == pytest.approx(runs["gpusampler"]["losses"], rel=1e-5)
    torch.manual_seed(42)
    model = TinyTransformer(hidden_size=32, num_layers=1, num_heads=2, longest=128)
    settings = replace(SETTINGS, **SMALL)
    lengths = demo_lengths(settings, 3)
    data = CountingData(lengths, 42)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = demo_sampler(settings, lengths, CostModel(), 0)
    for step in range(2):
        sequences = [data[i] for i in sampler.indices(step).tolist()]
        scores = torch.cat([model(each[None])[0, :-1] for each in sequences])
        loss = functional.cross_entropy(scores, torch.cat([each[1:] for each in sequences]))
        assert runs["gpusampler"]["losses"][step] == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.dist
@pytest.mark.slow
def test_failure_of_the_training_is_said(capfd):
    with pytest.raises(DemoError, match="failed with exit code 1"):
        _train(replace(SETTINGS, num_heads=5))
    assert "Error" in capfd.readouterr().err
