"""DeepSpeed: configurations as plain dictionaries and files, and a real engine where it is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from dist_integrations.common import launch, run_script

from gpusampler import GPUBatchRebalanceSampler
from gpusampler.integrations.deepspeed import fill_config

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
}
FILLED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
}


def sampler(batch: int = 16) -> GPUBatchRebalanceSampler:
    """Four samples a GPU, two slots, two ranks."""
    return GPUBatchRebalanceSampler(range(1, 65), batch, dp_size=2, grad_accum=2, rank=0)


@pytest.mark.parametrize("config", [AUTO, {"zero_optimization": {"stage": 2}}, FILLED])
def test_l13_auto_and_missing_sizes_are_filled_in(config: dict):
    before = json.dumps(config)
    assert fill_config(config, sampler()) == FILLED
    assert json.dumps(config) == before
    filled = fill_config(config, sampler())
    filled["zero_optimization"]["stage"] = 3
    assert config["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("train_micro_batch_size_per_gpu", 8, 4),
        ("gradient_accumulation_steps", 1, 2),
        ("train_batch_size", 8, 16),
    ],
)
def test_l13_a_contradiction_names_both_values(name: str, value: int, wanted: int):
    with pytest.raises(ValueError, match=f"{name} is {value} in the DeepSpeed configuration, .* makes it {wanted} "):
        fill_config({**AUTO, name: value}, sampler())


@pytest.mark.parametrize("value", [None, "4", 4.0, True, 0, -4])
def test_l13_nonsense_is_named(value: object):
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu must be"):
        fill_config({"train_micro_batch_size_per_gpu": value}, sampler())


def test_a_batch_that_deepspeed_cannot_divide():
    with pytest.raises(ValueError, match=r"must be a multiple of dp_size \* grad_accum = 2 \* 2 for DeepSpeed, got 18"):
        fill_config(AUTO, sampler(18))


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file(tmp_path: Path, kind: type):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(AUTO))
    assert fill_config(kind(path), sampler()) == FILLED


def test_what_is_no_configuration(tmp_path: Path):
    with pytest.raises(TypeError, match="config must be a mapping or the path of a JSON file, got 3"):
        fill_config(3, sampler())
    with pytest.raises(TypeError, match="sampler must be a GPUBatchRebalanceSampler, got 3"):
        fill_config(AUTO, 3)
    path = tmp_path / "broken.json"
    for content in (b'{"train_batch_size": ', b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"config: .*broken\.json is no JSON file: "):
            fill_config(path, sampler())
    with pytest.raises(FileNotFoundError, match="missing"):
        fill_config(tmp_path / "missing.json", sampler())


def test_example_without_deepspeed():
    example = Path(__file__).parent.parent / "examples" / "deepspeed_config.py"
    hidden = (
        f"import runpy, sys; sys.modules['deepspeed'] = None; runpy.run_path({str(example)!r}, run_name='__main__')"
    )
    config = json.loads(run_script([sys.executable, "-c", hidden]))
    assert {name: config[name] for name in ("train_batch_size", "gradient_accumulation_steps")} == {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
    }


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_real_engine_takes_the_sizes_and_the_weighted_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ranks = launch("deepspeed_run.py", tmp_path, timeout=400)  # the first run compiles
    assert [rank["sizes"] for rank in ranks] == [[12, 3, 2]] * 2
    assert sorted(row for rank in ranks for row in rank["rows"]) == list(range(48))
    assert max(rank["error"] for rank in ranks) < 1e-5  # ZeRO keeps float32
