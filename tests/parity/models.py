"""What a model of the parity proof is; `model_list.py` lists them, `kinds.py` builds them.

Every parameter starts random, norms and biases too. All start as functions of (seed, name, index), so that any part of
any layout starts with its part of one model.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron.core.counter_rng import stream_key
from megatron.core.parameters import Constant, Normal, canonical_names, draw_range, info_of
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

LENGTH = 16
SEED = 11
LAYERS = 4

OPTIMIZER: dict[str, float] = {"lr": 0.01, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_eps": 1e-6, "clip_grad": 0.5}
"""Of OptimizerConfig. Epsilon is large because some gradients are zero but for rounding, such as that of a bias of keys
under learned positions: Adam would divide rounding by rounding."""


@dataclass(frozen=True)
class Model:
    """One model and the text it is trained on."""

    name: str
    tied: bool = False
    positions: str = "rope"
    settings: dict[str, Any] = field(default_factory=dict)
    """Of TransformerConfig, beside those that all have."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the model's class."""
    packed: bool = False
    """Documents of any length, which do not see each other."""
    told_positions: bool = True
    """The model is given position ids; without, it has to find them out."""
    rows: int = 1
    """Samples of a micro-batch."""
    masked_step: int | None = None
    """A step whose whole batch is masked."""
    vocabulary: int = 53
    kind: str = "gpt"
    """The architecture, an entry of `kinds.KINDS`."""
    losses: tuple[str, ...] = ("per-token", "default")
    """How its loss can be averaged: sum over sum of the global batch, or mean over micro-batches."""
    starved: tuple[int, ...] = ()
    """Experts whose bias keeps every token away, so that there are ranks without one."""

    @property
    def experts(self) -> int:
        """Of a layer that has any."""
        return self.settings.get("num_moe_experts") or 0

    @property
    def is_latent(self) -> bool:
        return bool(self.settings.get("multi_latent_attention"))

    @property
    def predicting(self) -> int:
        """Layers that predict a token further on."""
        return self.settings.get("mtp_num_layers") or 0

    @property
    def couples_tokens(self) -> bool:
        """Something is computed over a micro-batch as a whole: how samples are cut into micro-batches does matter."""
        return bool(self.experts or self.predicting)

    @property
    def steps(self) -> int:
        """Of a run that shows everything: an update, and one that goes by what the first has left behind.

        A step without tokens leaves less; a bias of experts shows only in the choices of later steps.
        """
        biased = self.settings.get("moe_router_enable_expert_bias")
        return 3 if biased or self.masked_step is not None else 2

    @property
    def drops(self) -> bool:
        return bool(self.settings.get("hidden_dropout") or self.settings.get("attention_dropout"))

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return self.settings.get("num_query_groups", 8)

    def __hash__(self) -> int:
        return hash(self.name)


def transformer_config(model: Model, **settings: Any) -> TransformerConfig:
    """The model's config under a layout's settings; in float64 unless they say otherwise."""
    if not {"bf16", "params_dtype"} & set(settings):
        settings["fp64"] = True
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    kind = MLATransformerConfig if model.is_latent else TransformerConfig
    return kind(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=8,
        ffn_hidden_size=48,
        init_method_std=0.15,
        seed=SEED,
        **{**plain, **model.settings, **settings},
    )


@torch.no_grad()
def randomize_constants(model: nn.Module) -> None:
    """Add noise to what starts constant, a function of name and index as initial values are."""
    for _, parameter in canonical_names(model):
        info = info_of(parameter)
        if isinstance(info.init, Constant):
            noisy = dataclasses.replace(info, init=Normal(0.3))
            noise = parameter.data.new_empty(info.box.numel)
            draw_range(noise, noisy, 0, stream_key(SEED + 1, info.name))
            parameter.data.view(-1)[: info.box.numel] += noise


@torch.no_grad()
def starve(model: nn.Module, experts: tuple[int, ...]) -> None:
    """Let no token choose these experts."""
    for name, parameter in canonical_names(model):
        if name.endswith("router.expert_bias"):
            parameter[list(experts)] -= 100.0
