"""The cost model: its values, its presets against measured training, and what it refuses."""

from __future__ import annotations

import pickle
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from gpusampler import CostModel
from gpusampler.cost import ATTENTION_FLOP, BANDWIDTH_FLOPS, MAX_ALPHA, alpha_table
from gpusampler.errors import ParameterError, ParameterTypeError
from helpers import half_square

# 1 / alpha in tokens: least-squares fits of step_time = b * tokens + c * tokens * length to the training throughput
# that MosaicML publishes in llm-foundry, scripts/train/benchmarking/README.md, commit 8c8dd48 (Apache-2.0): FSDP with
# full sharding on 8 GPUs, FlashAttention, bf16.
MEASURED = [
    ("a100_40gb", "125m", 8032.954),
    ("a100_40gb", "350m", 7754.474),
    ("a100_40gb", "760m", 9983.059),
    ("a100_40gb", "1b", 12226.370),
    ("a100_40gb", "3b", 12789.230),
    ("a100_40gb", "7b", 20806.677),
    ("a100_40gb", "13b", 30908.310),
    ("a100_80gb", "125m", 8573.274),
    ("a100_80gb", "350m", 7420.987),
    ("a100_80gb", "760m", 11861.247),
    ("a100_80gb", "1b", 11458.344),
    ("a100_80gb", "3b", 12920.387),
    ("a100_80gb", "7b", 18834.473),
    ("a100_80gb", "13b", 23630.875),
    ("a100_80gb", "30b", 11057.119),
    ("h100_80gb", "760m", 7567.229),
    ("h100_80gb", "1b", 9135.790),
    ("h100_80gb", "3b", 10052.578),
    ("h100_80gb", "7b", 14185.353),
    ("h100_80gb", "13b", 16822.663),
    ("h100_80gb", "30b", 13012.802),
]
# Width, layers and heads of the MPT models in that repository, scripts/train/yamls/pretrain; the MLP is 4 wide.
SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
}


def ratio(name: str, measured: float) -> float:
    """Preset over measured 1 / alpha, or its inverse: at least 1."""
    hidden, layers, heads = SHAPES[name]
    predicted = 1 / CostModel.for_transformer(hidden_size=hidden, num_layers=layers, num_heads=heads).alpha
    return max(predicted / measured, measured / predicted)


@pytest.mark.parametrize(("gpu", "name", "measured"), MEASURED)
def test_preset_is_within_a_factor_of_two_of_measured_training(gpu: str, name: str, measured: float):
    assert ratio(name, measured) < 2


def test_worst_preset_is_as_far_off_as_the_constants_allow():
    assert len(MEASURED) == 21
    assert max(ratio(name, measured) for _, name, measured in MEASURED) == pytest.approx(1.87, abs=0.005)


def test_default_is_within_the_measured_range():
    measured = [tokens for _, _, tokens in MEASURED]
    assert min(measured) == pytest.approx(7400, rel=0.01)
    assert max(measured) == pytest.approx(31_000, rel=0.01)
    assert min(measured) < 1 / CostModel().alpha < max(measured)


def test_values():
    lengths = torch.tensor([[1, 100], [1000, 10_000]])
    assert CostModel()(lengths).tolist() == [[1.0001, 101.0], [1100.0, 20_000.0]]
    assert CostModel(alpha=0.0)(lengths).tolist() == lengths.tolist()
    assert CostModel(alpha=0.5)(torch.tensor([2], dtype=torch.int8)).tolist() == [4.0]
    assert CostModel()(torch.tensor([2**31 - 1]))[0].item() == pytest.approx(461_170_748_896_889, rel=1e-12)
    own = CostModel(alpha=123.0, cost_fn=half_square)
    assert own(lengths).tolist() == [[1.5, 5100.0], [501_000.0, 50_010_000.0]]
    assert own(lengths).dtype == torch.float64
    assert CostModel()(torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_preset_by_hand():
    # parameters: 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 256 = 12288 + 49152 = 61440
    linear = 2 * 61440 + BANDWIDTH_FLOPS * 64
    options: dict[str, Any] = {
        "hidden_size": 64,
        "num_layers": 3,
        "intermediate_size": 256,
        "num_heads": 4,
        "num_kv_heads": 2,
        "gated_mlp": True,
    }
    assert CostModel.for_transformer(**options).alpha == pytest.approx(2 * 4 * 16 * ATTENTION_FLOP / linear)
    both = CostModel.for_transformer(**options, causal=False)
    assert both.alpha == pytest.approx(4 * 4 * 16 * ATTENTION_FLOP / linear)
    assert CostModel.for_transformer(**{**options, "num_layers": 99}) == CostModel.for_transformer(**options)
    assert CostModel.for_transformer(**options, intercept=5).intercept == 5.0


def test_preset_defaults():
    full: dict[str, Any] = {"hidden_size": 256, "num_layers": 1, "intermediate_size": 1024}
    assert CostModel.for_transformer(hidden_size=256, num_layers=1) == CostModel.for_transformer(
        **full, num_heads=4, num_kv_heads=4, head_dim=64
    )
    assert CostModel.for_transformer(**full, num_heads=8) == CostModel.for_transformer(**full, num_heads=8, head_dim=32)
    wide = CostModel.for_transformer(**full, num_heads=3, head_dim=96)  # heads need not fill the width
    assert wide.alpha > CostModel.for_transformer(**full, num_heads=4).alpha


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"hidden_size": 64.0}, "hidden_size must be an int, got 64.0"),
        ({"hidden_size": True}, "hidden_size must be an int, got True"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"intermediate_size": -4}, "intermediate_size must be at least 1, got -4"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_heads": 7}, "num_heads must divide hidden_size, got 7 heads for a hidden size of 64"),
        ({"num_heads": 4, "num_kv_heads": 5}, "num_kv_heads must be at most 4, got 5"),
        ({"num_heads": 4, "num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"intercept": -1.0}, "intercept must be at least 0.0, got -1.0"),
        ({"intercept": float("inf")}, "intercept must be finite, got inf"),
    ],
)
def test_bad_sizes_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ParameterError, match=message):
        CostModel.for_transformer(**{"hidden_size": 64, "num_layers": 2, **options})


LLAMA: dict[str, Any] = {
    "hidden_size": 256,
    "num_layers": 2,
    "intermediate_size": 688,
    "num_heads": 8,
    "num_kv_heads": 2,
    "gated_mlp": True,
}
LLAMA_CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig(**LLAMA_CONFIG), LLAMA),
    "qwen2": (transformers.Qwen2Config(**LLAMA_CONFIG), LLAMA),
    "mistral": (transformers.MistralConfig(**LLAMA_CONFIG), LLAMA),
    "gpt2": (
        transformers.GPT2Config(n_embd=96, n_layer=3, n_head=6),
        {"hidden_size": 96, "num_layers": 3, "num_heads": 6},
    ),
    "gemma2": (
        transformers.Gemma2Config(**LLAMA_CONFIG, head_dim=64),
        {**LLAMA, "head_dim": 64},
    ),
    "mixtral": (
        transformers.MixtralConfig(**LLAMA_CONFIG, num_experts_per_tok=2),
        {**LLAMA, "intermediate_size": 2 * 688},
    ),
    "qwen2 moe": (
        transformers.Qwen2MoeConfig(**LLAMA_CONFIG, num_experts_per_tok=4, moe_intermediate_size=100),
        {**LLAMA, "intermediate_size": 400},
    ),
    "bert": (
        transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=100),
        {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 100, "causal": False},
    ),
    "bert as a decoder": (
        transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, architectures=["BertLMHeadModel"]
        ),
        {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 3072},
    ),
    "t5": (
        transformers.T5Config(d_model=64, d_kv=8, d_ff=100, num_layers=2, num_heads=4),
        {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "head_dim": 8, "intermediate_size": 100},
    ),
    "t5 gated": (
        transformers.T5Config(d_model=64, d_kv=8, d_ff=99, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"),
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "head_dim": 8,
            "intermediate_size": 99,
            "gated_mlp": True,
        },
    ),
    "llava": (transformers.LlavaConfig(text_config=transformers.LlamaConfig(**LLAMA_CONFIG)), LLAMA),
    "object": (SimpleNamespace(**LLAMA_CONFIG, hidden_act="silu", head_dim=None), LLAMA),
    "mapping": ({**LLAMA_CONFIG, "hidden_act": "silu"}, LLAMA),
    "other mapping": (UserDict({**LLAMA_CONFIG, "hidden_act": "silu"}), LLAMA),
    "text within a mapping": ({"hidden_size": 7, "text_config": {**LLAMA_CONFIG, "hidden_act": "silu"}}, LLAMA),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_presets_from_configs(name: str):
    config, sizes = CONFIGS[name]
    expected = CostModel.for_transformer(**sizes)
    assert CostModel.from_config(config) == expected
    assert CostModel.from_config(config, intercept=7).intercept == 7.0
    if isinstance(config, transformers.PretrainedConfig):
        assert CostModel.from_config(config.to_dict()) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config must have one of hidden_size, n_embd, d_model, dim, got dict"),
        (None, "config must have one of hidden_size.*got NoneType"),
        ("llama", "config must have one of hidden_size.*got str"),
        ({"hidden_size": 64}, "config must have one of num_hidden_layers"),
        ({"hidden_size": 64, "num_layers": 2}, "config must have one of num_attention_heads"),
        ({"hidden_size": 0, "num_layers": 2, "num_heads": 2}, "hidden_size must be at least 1, got 0"),
        ({"hidden_size": "64", "num_layers": 2, "num_heads": 2}, "hidden_size must be an int, got '64'"),
        ({"hidden_size": 64, "num_layers": 2, "num_heads": [2, 4]}, r"num_heads must be an int, got \[2, 4\]"),
        ({"text_config": {}}, "config must have one of hidden_size"),
    ],
)
def test_bad_configs_are_named(config: Any, message: str):
    with pytest.raises(ParameterError, match=message):
        CostModel.from_config(config)


def short(lengths: torch.Tensor) -> torch.Tensor:
    return lengths[:1].double()


def falling(lengths: torch.Tensor) -> torch.Tensor:
    return 100.0 - lengths


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (short, r"cost_fn must return a tensor of shape \(3,\), got shape \(1,\)"),
        (lambda n: 1.0, r"cost_fn must return a tensor of shape \(3,\), got float"),
        (lambda n: n.numpy(), r"cost_fn must return a tensor of shape \(3,\), got ndarray"),
        (lambda n: None, "got NoneType"),
        (lambda n: n - 5.0, "positive finite costs, got 0.0 for length 5"),
        (lambda n: n - 7, "positive finite costs, got -2.0 for length 5"),
        (lambda n: n / 0.0, "positive finite costs, got inf for length 5"),
        (lambda n: torch.where(n == 8, torch.nan, 1.0), "positive finite costs, got nan for length 8"),
        (falling, "must not decrease with the length, got 95.0 for length 5 and 92.0 for length 8"),
    ],
)
def test_bad_cost_functions_are_named(function: Any, message: str):
    with pytest.raises(ParameterError, match=message):
        CostModel(cost_fn=function)(torch.tensor([5, 9, 8]))


def test_a_cost_function_may_use_gradients_and_other_dtypes():
    weight = torch.ones(1, requires_grad=True)
    costs = CostModel(cost_fn=lambda n: n.float() * weight)(torch.tensor([3, 1]))
    assert costs.tolist() == [3.0, 1.0]
    assert not costs.requires_grad


def test_a_cost_function_sees_int64():
    seen = []

    def spy(lengths: torch.Tensor) -> torch.Tensor:
        seen.append(lengths.dtype)
        return lengths

    CostModel(cost_fn=spy)(torch.tensor([1, 2], dtype=torch.uint8))
    assert seen == [torch.int64]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"alpha": -1e-9}, ParameterError, "alpha must be at least 0.0, got -1e-09"),
        ({"alpha": "1e-4"}, ParameterTypeError, "alpha must be a number, got '1e-4'"),
        ({"alpha": None}, ParameterTypeError, "alpha must be a number, got None"),
        ({"alpha": 2e6}, ParameterError, "alpha must be at most 1000000.0, got 2000000.0"),
        ({"intercept": float("nan")}, ParameterError, "intercept must be finite, got nan"),
        ({"intercept": False}, ParameterTypeError, "intercept must be a number, got False"),
        ({"cost_fn": 3}, ParameterTypeError, "cost_fn must be callable, got 3"),
    ],
)
def test_bad_fields_are_named(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        CostModel(**options)


def test_models_are_values():
    assert CostModel(alpha=1, intercept=2) == CostModel(alpha=1.0, intercept=2.0)
    assert hash(CostModel(cost_fn=half_square)) == hash(CostModel(cost_fn=half_square))
    for model in (CostModel(), CostModel(alpha=0.0, intercept=3.0), CostModel(cost_fn=half_square)):
        assert pickle.loads(pickle.dumps(model)) == model
    with pytest.raises(AttributeError):
        CostModel().alpha = 1.0


def test_alphas_are_rounded_once():
    table = alpha_table(1e-4)
    assert table.tolist()[:15] == [0] * 13 + [1, 2]  # 2**13 / 10,000 = 0.82, 2**14 / 10,000 = 1.6
    assert table[40] == 109_951_163
    assert alpha_table(MAX_ALPHA)[40] == 10**6 * 2**40
    assert not alpha_table(0.0).any()
