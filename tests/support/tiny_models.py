"""Tiny transformers: their config, their model, random values for their parameters, and a part of a user's own."""

from typing import Any

import torch
from torch import nn

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig


def tiny_config(kind: type[TransformerConfig] = TransformerConfig, **fields: Any) -> Any:
    """Returns a config of two layers in float64 without dropout, with other `fields` where they are given."""
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    plain = {"fp64": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    return kind(**sizes | plain | fields)


def tiny_gpt(config: TransformerConfig, vocabulary: int = 37, length: int = 16, **model: Any) -> GPTModel:
    """Returns a GPT, on one pipeline stage, of the layers that a config describes, also those that predict further."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, pp_rank=0)
    further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, pp_rank=0)
    return GPTModel(config, spec, vocabulary, length, mtp_block_spec=further, **model)


@torch.no_grad()
def randomize(module: nn.Module) -> None:
    """Sets all parameters to random values, also norms and biases, since zeros and ones hide errors."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator) * 0.4)


class OwnNorm(nn.LayerNorm):
    """A norm of a user, who knows nothing of descriptors."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
