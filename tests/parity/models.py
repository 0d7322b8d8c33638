"""The models of the parity proof: small ones that differ in everything a layout could get wrong.

Every parameter starts random, norms and biases too. All start as functions of (seed, name, index), so that any part of
any layout starts with its part of one model.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron.core.counter_rng import stream_key
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters import Constant, Normal, canonical_names, draw_range, info_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

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
    packed: bool = False
    """Documents of any length, which do not see each other."""
    told_positions: bool = True
    """The model is given position ids; without, it has to find them out."""
    rows: int = 1
    """Samples of a micro-batch."""
    masked_step: int | None = None
    """A step whose whole batch is masked."""
    vocabulary: int = 53

    @property
    def drops(self) -> bool:
        return bool(self.settings.get("hidden_dropout") or self.settings.get("attention_dropout"))

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return self.settings.get("num_query_groups", 8)

    def __hash__(self) -> int:
        return hash(self.name)


_LLAMA = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
}
_DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.15}

MODELS = [
    Model("llama-gqa", settings={**_LLAMA, "num_query_groups": 2}, masked_step=1),
    Model("gpt2", tied=True, positions="learned_absolute", settings=_DROPOUT, rows=2),
    Model(
        "qknorm",
        tied=True,
        settings={"qk_layernorm": True, "num_query_groups": 4, "hidden_dropout": 0.2, "normalization": "RMSNorm"},
        vocabulary=64,
    ),
    Model(
        "mqa",
        settings={"num_query_groups": 1, "add_bias_linear": False, "add_qkv_bias": True, "attention_dropout": 0.2},
        rows=2,
    ),
    Model(
        "packed",
        settings={**_LLAMA, "num_query_groups": 4, "qk_layernorm": True, **_DROPOUT},
        packed=True,
        told_positions=False,
        rows=2,
    ),
    Model(
        "packed-learned",
        tied=True,
        positions="learned_absolute",
        settings={"window_size": (5, 0), "window_attn_skip_freq": 2},
        packed=True,
    ),
    Model(
        "window-sink",
        tied=True,
        settings={**_LLAMA, "window_size": (6, 0), "window_attn_skip_freq": 3, "softmax_type": "learnable"},
        vocabulary=97,
    ),
]
"""Tied and not, GQA, MQA, norms of queries and keys, learned and rotary positions, dropout, packed documents, windows,
sinks, odd vocabularies, biases and none."""


def transformer_config(model: Model, **settings: Any) -> TransformerConfig:
    """The model's config under a layout's settings; in float64 unless they say otherwise."""
    if not {"bf16", "params_dtype"} & set(settings):
        settings["fp64"] = True
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=8,
        ffn_hidden_size=48,
        init_method_std=0.15,
        seed=SEED,
        **{**plain, **model.settings, **settings},
    )


def build_model(
    model: Model,
    config: TransformerConfig,
    groups: ProcessGroupCollection | None = None,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> GPTModel:
    """The model, or one chunk of it."""
    built = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm),
        model.vocabulary,
        LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type=model.positions,  # type: ignore[arg-type]
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    randomize_constants(built)
    return built


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
