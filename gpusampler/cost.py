"""What a micro-batch costs: a model of one sample's cost as a function of the length it is padded to.

A padded micro-batch of n samples, the longest of length L, costs `intercept + n * f(L)` with
`f(L) = L + alpha * L**2`, in units of one token of the linear part of the network: `alpha` is one over the length at
which attention costs as much as all the rest. Only ratios of costs matter to a plan.

The default `alpha = 1e-4` is the middle of measured training: least-squares fits of published FSDP step times of
125M to 30B decoder models with fused attention (MosaicML llm-foundry, scripts/train/benchmarking, commit 8c8dd48,
Apache-2.0) put 1 / alpha between 7,400 and 31,000 tokens.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpusampler.errors import ParameterError, ParameterTypeError, check_bool, check_float, check_int, quote
from gpusampler.kernels.spec import MAX_SHIFT

CostFunction = Callable[[torch.Tensor], torch.Tensor]

MAX_ALPHA = 1e6

# Time of an attention FLOP over that of a matrix-product FLOP, and time of the work that is bound by memory bandwidth
# (norms, residuals, activations, optimizer traffic) a hidden unit, token and layer, in matrix-product FLOPs. Both are
# fitted to the 21 measured models named above so that the worst ratio of predicted to measured 1 / alpha is least
# (1.87, the 30B and 13B models on the A100); `tests/test_cost.py` holds the table and the bound.
ATTENTION_FLOP = 6.0
BANDWIDTH_FLOPS = 76_000.0

_GATED_ACTIVATIONS = frozenset({"silu", "swish", "swiglu", "geglu"})
_ENCODERS = (
    *(
        "bert",
        "roberta",
        "xlm-roberta",
        "distilbert",
        "camembert",
        "modernbert",
        "deberta",
        "electra",
        "albert",
        "mpnet",
    ),
    *("longformer", "big_bird", "esm", "vit", "deit", "beit", "dinov2", "swin", "wav2vec2", "hubert", "wavlm"),
)


@dataclass(frozen=True)
class CostModel:
    """Cost of one sample at a padded length, and of a micro-batch.

    Attributes:
        alpha: weight of the squared length, 0 to 1e6, in 1 / tokens. Ignored when `cost_fn` is given.
        intercept: cost of a micro-batch besides its samples, >= 0, in the unit of the sample cost.
        cost_fn: maps an int64 tensor of lengths to their costs, element by element: positive, finite and nondecreasing
            in the length. A module-level function, if the model is to be pickled.

    Raises:
        ParameterError: a value out of its range, naming it.

    Example:
        >>> CostModel(alpha=1e-4)(torch.tensor([1000, 10_000]))
        tensor([ 1100., 20000.], dtype=torch.float64)
        >>> round(1 / CostModel.for_transformer(hidden_size=4096, num_layers=32, num_heads=32).alpha)
        14525
    """

    alpha: float = 1e-4
    intercept: float = 0.0
    cost_fn: CostFunction | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        object.__setattr__(self, "alpha", check_float("alpha", self.alpha, minimum=0.0))
        object.__setattr__(self, "intercept", check_float("intercept", self.intercept, minimum=0.0))
        if self.alpha > MAX_ALPHA:
            raise ParameterError(f"alpha must be at most {MAX_ALPHA}, got {self.alpha}")
        if self.cost_fn is not None and not callable(self.cost_fn):
            raise ParameterTypeError(f"cost_fn must be callable, got {quote(self.cost_fn)}")

    @classmethod
    def for_transformer(
        cls,
        *,
        hidden_size: int,
        num_layers: int,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        gated_mlp: bool = False,
        causal: bool = True,
        intercept: float = 0.0,
    ) -> CostModel:
        """Preset for a transformer trained with fused attention.

        Per token and layer the forward pass spends `2 * parameters` FLOPs in matrix products, with
        `parameters = hidden * head_dim * (2 * heads + 2 * kv_heads) + m * hidden * intermediate` (m = 3 if the MLP is
        gated, else 2), and `BANDWIDTH_FLOPS * hidden` equivalents in work bound by memory bandwidth. Attention over L
        tokens spends `4 * heads * head_dim * L` FLOPs a token, half of that if causal, each `ATTENTION_FLOP` times as
        slow. The backward pass costs twice the forward pass in both, so that it cancels; so does the number of layers.
        `alpha` is the ratio at L = 1. The two constants are fitted to measured training, see the module.

        Args:
            hidden_size: width of the model, >= 1.
            num_layers: layers, >= 1; every layer is alike, so that it does not change `alpha`.
            intermediate_size: width of the MLP; default 4 * hidden_size. In a mixture of experts: the width of one
                expert times the experts a token is sent to.
            num_heads: attention heads; default: as many as are `hidden_size` wide together.
            num_kv_heads: key and value heads; default num_heads.
            head_dim: width of a head; default hidden_size / num_heads.
            gated_mlp: the MLP has three matrices (SwiGLU, GeGLU) rather than two.
            causal: each token attends to those before it only.
            intercept: as in `CostModel`.

        Returns:
            A model with the preset `alpha`.

        Raises:
            ParameterError: a size below 1, or heads that do not divide.
        """
        hidden = check_int("hidden_size", hidden_size, minimum=1)
        check_int("num_layers", num_layers, minimum=1)
        mlp = 4 * hidden if intermediate_size is None else check_int("intermediate_size", intermediate_size, minimum=1)
        width = None if head_dim is None else check_int("head_dim", head_dim, minimum=1)
        if num_heads is not None:
            heads = check_int("num_heads", num_heads, minimum=1)
        elif num_kv_heads is not None:
            raise ParameterError(f"num_heads must be given with num_kv_heads={num_kv_heads}, got None")
        else:
            heads = 1 if width is None else max(1, hidden // width)
        if width is None:
            width = hidden // heads
            if hidden % heads:
                raise ParameterError(
                    f"num_heads must divide hidden_size, got {heads} heads for a hidden size of {hidden}"
                )
        kv_heads = heads if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads, minimum=1, maximum=heads)
        parameters = hidden * width * (2 * heads + 2 * kv_heads) + (3 if gated_mlp else 2) * hidden * mlp
        linear = 2.0 * parameters + BANDWIDTH_FLOPS * hidden
        attention = (2.0 if check_bool("causal", causal) else 4.0) * heads * width * ATTENTION_FLOP
        return cls(alpha=attention / linear, intercept=intercept)

    @classmethod
    def from_config(cls, config: Any, *, intercept: float = 0.0) -> CostModel:
        """Preset from a model's config: a transformers `PretrainedConfig`, another object, or a mapping.

        Reads the names in use: hidden_size / n_embd / d_model / dim, num_hidden_layers / n_layer / num_layers,
        intermediate_size / n_inner / ffn_dim / d_ff, num_attention_heads / n_head, num_key_value_heads, head_dim,
        num_experts_per_tok with moe_intermediate_size, hidden_act. A config with a text part (`text_config`) is read
        there. Encoder models (no `is_decoder`, no causal architecture) are taken as not causal.

        Args:
            config: the model's config.
            intercept: as in `CostModel`.

        Returns:
            `for_transformer` of the sizes found.

        Raises:
            ParameterError: the config names no width, layers or heads; it says which names were looked for.
        """
        read = _reader(config)
        hidden = read("hidden_size", "n_embd", "d_model", "dim", required=True)
        layers = read("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", required=True)
        heads = read("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", required=True)
        mlp = read("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim")
        experts = read("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
        if experts:
            experts = check_int("num_experts_per_tok", experts, minimum=1)
            mlp = (read("moe_intermediate_size") or mlp or 4 * hidden) * experts
        activation = read("hidden_act", "hidden_activation", "feed_forward_proj")
        return cls.for_transformer(
            hidden_size=hidden,
            num_layers=layers,
            intermediate_size=mlp,
            num_heads=heads,
            num_kv_heads=read("num_key_value_heads", "num_kv_heads"),
            head_dim=read("head_dim", "d_kv"),
            gated_mlp=isinstance(activation, str)
            and (activation in _GATED_ACTIVATIONS or "gated" in activation or _type_of(read).startswith("gemma")),
            causal=_is_causal(read),
            intercept=intercept,
        )

    @classmethod
    def fit(cls, records: Any) -> CostModel:
        """Fit the model to measured times; `gpusampler.calibrate.fit_cost` also tells how sure it is.

        Args:
            records: [n, 3], or an iterable of (samples, padded length, seconds) of a micro-batch each.

        Returns:
            A model with `alpha` and `intercept` in tokens.

        Raises:
            ParameterError: bad records, or too few distinct shapes; it says what to measure.
        """
        from gpusampler.calibrate import fit_cost

        return fit_cost(records).model

    def __call__(self, lengths: torch.Tensor) -> torch.Tensor:
        """Cost of one sample at each length.

        Args:
            lengths: integer tensor of any shape, lengths >= 1.

        Returns:
            float64 tensor of the same shape and device.

        Raises:
            ParameterError: `cost_fn` returned something other than one positive finite cost a length, or costs that
                fall as the length grows; it names the length and the cost.
        """
        if self.cost_fn is None:
            wide = lengths.to(torch.float64)
            return wide + self.alpha * wide * wide
        costs = self.unchecked(lengths)
        _check_costs(lengths.reshape(-1), costs.reshape(-1))
        return costs

    def unchecked(self, lengths: torch.Tensor) -> torch.Tensor:
        """What `cost_fn` returns, as float64 [like `lengths`], without looking at the values, which waits for a GPU.

        Raises:
            ParameterError: `cost_fn` returned something else than a tensor of the shape of `lengths`.
        """
        if self.cost_fn is None:
            return self(lengths)
        costs = self.cost_fn(lengths.detach().to(torch.int64, copy=True))
        if not isinstance(costs, torch.Tensor) or costs.shape != lengths.shape:
            what = f"shape {tuple(costs.shape)}" if isinstance(costs, torch.Tensor) else type(costs).__name__
            raise ParameterError(f"cost_fn must return a tensor of shape {tuple(lengths.shape)}, got {what}")
        return costs.detach().to(device=lengths.device, dtype=torch.float64)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields; a `cost_fn` that cannot be pickled is named."""
        try:
            pickle.dumps(self.cost_fn)
        except Exception as error:
            raise pickle.PicklingError(
                f"cost_fn {quote(self.cost_fn)} cannot be pickled, use a function at the top of a module: {error}"
            ) from error
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields."""
        for name, value in state.items():
            object.__setattr__(self, name, value)


def alpha_table(alpha: float) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`alpha * 2**shift`, rounded, for each shift of the planner's integer costs, int64 [MAX_SHIFT + 1]."""
    return np.array([round(alpha * 2.0**shift) for shift in range(MAX_SHIFT + 1)], dtype=np.int64)


def _check_costs(lengths: torch.Tensor, costs: torch.Tensor) -> None:
    good = torch.isfinite(costs) & (costs > 0)
    if not bool(good.all()):
        i = int((~good).nonzero()[0])
        raise ParameterError(
            f"cost_fn must return positive finite costs, got {float(costs[i])} for length {int(lengths[i])}"
        )
    by_length = torch.argsort(lengths, stable=True)
    falls = (costs[by_length][1:] < costs[by_length][:-1]).nonzero()
    if falls.numel():
        at = int(falls[0, 0])
        shorter, longer = int(by_length[at]), int(by_length[at + 1])
        raise ParameterError(
            f"cost_fn must not decrease with the length, got {float(costs[shorter])} for length "
            f"{int(lengths[shorter])} and {float(costs[longer])} for length {int(lengths[longer])}"
        )


def _reader(config: Any) -> Callable[..., Any]:
    text = config.get("text_config") if isinstance(config, Mapping) else getattr(config, "text_config", None)
    source = config if text is None else text

    def read(*names: str, required: bool = False) -> Any:
        for name in names:
            value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
            if value is not None:
                return value
        if required:
            raise ParameterError(f"config must have one of {', '.join(names)}, got {type(config).__name__}")
        return None

    return read


def _type_of(read: Callable[..., Any]) -> str:
    return str(read("model_type") or "").lower()


def _is_causal(read: Callable[..., Any]) -> bool:
    architectures = read("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, (list, tuple)) else []
    if any("CausalLM" in name or "LMHead" in name for name in names) or read("is_decoder"):
        return True
    if any("Masked" in name or "Encoder" in name for name in names):
        return False
    return not _type_of(read).replace("_", "-").startswith(tuple(name.replace("_", "-") for name in _ENCODERS))
