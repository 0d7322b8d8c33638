"""Models of the parity tests: their description. `model_list.py` lists them, `kinds.py` builds them.

Every parameter is initialised at random, also norms and biases. Initial values are functions of (seed, name, index), so
all layouts start from the same model.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatron.core.counter_rng import stream_key
from megatron.core.initializers import Constant, Normal
from megatron.core.parameters import canonical_names, draw_range, info_of
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

LENGTH = 16
SEED = 11
LAYERS = 4
FEW_LAYERS = 2
"""Layers of a cell in which more of them would show nothing new."""

OPTIMIZER: dict[str, float] = {"lr": 0.01, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_eps": 1e-6, "clip_grad": 0.5}
"""Fields of OptimizerConfig. Epsilon is large because some gradients are zero up to rounding, such as that of the key
bias with learned positions. With a small epsilon Adam would amplify this rounding."""


@dataclass(frozen=True)
class Model:
    """One model and the text it is trained on."""

    name: str
    tied: bool = False
    positions: str = "rope"
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig, beside those that all models share."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model's class."""
    packed: bool = False
    """The text is packed documents that do not attend to each other."""
    told_positions: bool = True
    """The model receives position ids; if false, it computes them."""
    rows: int = 1
    """Samples of a micro-batch."""
    masked_step: int | None = None
    """A step whose whole batch is masked."""
    vocabulary: int = 53
    kind: str = "gpt"
    """The architecture, an entry of `kinds.KINDS`."""
    losses: tuple[str, ...] = ("per-token", "default")
    """Averages of the loss that the model is tested with. `per-token`: sum of losses divided by the global batch's
    tokens; `default`: mean over micro-batches."""
    starved: tuple[int, ...] = ()
    """Experts with a bias so low that no token chooses them. Some ranks then have only idle experts."""

    @property
    def experts(self) -> int:
        """Number of experts of a layer with experts."""
        return self.settings.get("num_moe_experts") or 0

    @property
    def is_latent(self) -> bool:
        return bool(self.settings.get("multi_latent_attention"))

    @property
    def predicting(self) -> int:
        """Number of multi-token prediction layers."""
        return self.settings.get("mtp_num_layers") or 0

    @cached_property
    def kinds_of_layers(self) -> int:
        """Number of layers after which their kinds repeat: 1 if layers differ only in their weights, 2 if two kinds
        take turns, and `LAYERS` for longer patterns."""
        every = {"window_attn_skip_freq", "attention_chunk_skip_freq", "no_rope_freq", "moe_layer_freq"}
        lists = {"hybrid_layer_pattern", "heterogeneous_layers_config_encoded_json"}
        patterns = [self.settings[name] for name in every | lists | {"linear_attention_freq"} if name in self.settings]
        if not patterns:
            return 1
        return 2 if all(pattern == 2 for pattern in patterns) else LAYERS

    @property
    def couples_tokens(self) -> bool:
        """Tells whether an operation acts on a whole micro-batch, so that results depend on the micro-batch size."""
        return bool(self.experts or self.predicting)

    @property
    def steps(self) -> int:
        """Number of training steps that a test needs: two, so that the second one uses updated weights.

        A step without tokens needs one step more, and so does an expert bias, which first matters in the next step.
        """
        biased = self.settings.get("moe_router_enable_expert_bias")
        return 3 if biased or self.masked_step is not None else 2

    @property
    def drops(self) -> bool:
        return bool(self.settings.get("hidden_dropout") or self.settings.get("attention_dropout"))

    @property
    def groups(self) -> int:
        """Number of key and value heads."""
        return self.settings.get("num_query_groups", 8)

    def __hash__(self) -> int:
        return hash(self.name)


def transformer_config(model: Model, layers: int = LAYERS, **settings: Any) -> TransformerConfig:
    """Returns the model's config with the settings of a layout, in float64 unless they choose another type.

    Each stack has this number of `layers`.
    """
    if not {"bf16", "params_dtype"} & set(settings):
        settings["fp64"] = True
    if "num_encoder_layers" in model.settings:
        settings["num_encoder_layers"] = layers
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_hidden_size": 48}
    kind = MLATransformerConfig if model.is_latent else TransformerConfig
    return kind(
        num_layers=layers,
        hidden_size=32,
        num_attention_heads=8,
        init_method_std=0.15,
        seed=SEED,
        **{**plain, **model.settings, **settings},
    )


@torch.no_grad()
def randomize_constants(model: nn.Module) -> None:
    """Adds noise to parameters with constant initial values. The noise is a function of name and index."""
    for _, parameter in canonical_names(model):
        info = info_of(parameter)
        if isinstance(info.init, Constant):
            noisy = dataclasses.replace(info, init=Normal(0.3))
            noise = parameter.data.new_empty(info.box.numel)
            draw_range(noise, noisy, 0, stream_key(SEED + 1, info.name))
            parameter.data.view(-1)[: info.box.numel] += noise


@torch.no_grad()
def starve(model: nn.Module, experts: tuple[int, ...]) -> None:
    """Lowers the bias of these experts so far that no token chooses them."""
    for name, parameter in canonical_names(model):
        if name.endswith("router.expert_bias"):
            parameter[list(experts)] -= 100.0
