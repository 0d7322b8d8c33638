"""Which kernels compute attention, as the log says it."""

import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import describe_kernels
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**settings) -> TransformerConfig:
    settings = {"fp64": True, "hidden_dropout": 0.0, "attention_dropout": 0.0} | settings
    return TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, **settings
    )


def gpt(**settings) -> GPTModel:
    return GPTModel(config(**settings), get_gpt_layer_local_spec(), vocab_size=37, max_sequence_length=16)


def test_kernels_in_use_are_told() -> None:
    lines = describe_kernels(
        gpt(attention_dropout=0.1, window_size=(3, 0), window_attn_skip_freq=2), torch.device("cpu")
    )
    assert lines == [
        "backend local: plain torch but for keep_rows",
        "attention of layers 1 to 2 on cpu: training: unfused, since SDPA (CPU flash): it cannot draw our dropout "
        "masks (attention dropout 0.1); evaluation: SDPA (CPU flash)",
    ]
