"""Impossible values of initial weights are named, with what would work; what follows from the width under muP."""

from typing import Any

import torch
from support.tiny_models import tiny_config, tiny_gpt

from megatron.core.initializers import Normal
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import settings_of
from megatron.core.parameters import info_of
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def test_what_follows_from_the_width() -> None:
    wide = TransformerConfig(**SMALL, use_mup=True, mup_base_hidden_size=16, mup_embedding_mult=3.0)
    assert wide.mup_width_mult == 4.0
    assert (wide.init_method, wide.embedding_init_method) == (Normal(0.01), Normal(0.02))
    assert wide.output_layer_init_method == Normal(0.005)  # 0.02 / sqrt(4) / sqrt(2 * 2 layers)
    assert (wide.embedding_multiplier, wide.logit_scale, wide.softmax_scale) == (3.0, 0.25, 1 / 16)
    heads = {"mup_base_head_dim": 9.0, "mup_attn_scale_power": 0.5, "mup_output_mult": 0.7}
    own = TransformerConfig(**SMALL, use_mup=True, mup_base_hidden_size=16, **heads)
    assert (own.logit_scale, own.softmax_scale) == (0.7, 3 / 4)
    base = TransformerConfig(**SMALL, use_mup=True, mup_base_head_dim=16.0)
    assert (base.mup_width_mult, base.softmax_scale, base.init_method) == (1.0, 1 / 4, Normal(0.02))


def drift(width: int, mup: bool) -> float:
    """Trains for three steps of Adam and returns how much the logits change, as a root mean square."""
    fields: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 32, "mup_base_head_dim": 16.0} if mup else {}
    config = tiny_config(hidden_size=width, num_attention_heads=width // 16, fp64=False, init_method_std=0.1, **fields)
    model = tiny_gpt(config, 32, 8)
    rates = OptimizerConfig(lr=0.01, mup_width_mult=config.mup_width_mult)
    groups = [
        {"params": [parameter], "lr": 0.01 * settings_of(info_of(parameter), rates).lr_mult}
        for parameter in model.parameters()
    ]
    optimizer = torch.optim.Adam(groups)
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        before = model(inputs)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs, labels=labels).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return (model(inputs) - before).square().mean().sqrt().item()


def test_updates_of_a_wide_model_are_as_large_as_those_of_a_narrow_one() -> None:
    """The coordinate check of muP: without it, the same rate changes the logits of a wider model more."""
    narrow, wide = drift(32, mup=True), drift(256, mup=True)
    assert 0.5 < wide / narrow < 1.6, (narrow, wide)
    assert drift(256, mup=False) > 2.5 * drift(32, mup=False)
