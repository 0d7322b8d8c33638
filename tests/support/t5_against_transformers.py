"""Small T5 models of transformers with random weights, and the same models as ours.

`MAPPING` says which of their tensors is which of ours, for both stacks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.core.ops.activation import gelu_tanh
from megatron.core.transformer.transformer_config import TransformerConfig


class InFloat64(TorchFunctionMode):
    """Where transformers computes norms and softmax in float32 for a model of any type, float64 stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.float64
        if wide and (func is Tensor.float or (func is Tensor.to and torch.float32 in args[1:])):
            return args[0]
        return func(*args, **(kwargs or {}))


Join = Callable[[list[Tensor], int], Tensor]


def by_head(tensors: list[Tensor], heads: int) -> Tensor:
    """Rows of ours: for each head, its rows of each tensor in turn."""
    return torch.stack([tensor.unflatten(0, (heads, -1)) for tensor in tensors], 1).flatten(0, 2)


def one_after_the_other(tensors: list[Tensor], heads: int) -> Tensor:
    return torch.cat(tensors)


def the_only_one(tensors: list[Tensor], heads: int) -> Tensor:
    return tensors[0]


_ATTENTION = "layer.0.SelfAttention."
_CROSS = "layer.1.EncDecAttention."

ENCODER_LAYER: dict[str, tuple[list[str], Join]] = {
    "input_layernorm.weight": (["layer.0.layer_norm.weight"], the_only_one),
    "self_attention.linear_qkv.weight": ([f"{_ATTENTION}{part}.weight" for part in "qkv"], by_head),
    "self_attention.linear_proj.weight": ([f"{_ATTENTION}o.weight"], the_only_one),
    "pre_mlp_layernorm.weight": (["layer.1.layer_norm.weight"], the_only_one),
    "mlp.linear_fc1.weight": (["layer.1.DenseReluDense.wi.weight"], the_only_one),
    "mlp.linear_fc2.weight": (["layer.1.DenseReluDense.wo.weight"], the_only_one),
}
"""For each tensor of a layer of ours: theirs, and how they are joined."""

DECODER_LAYER: dict[str, tuple[list[str], Join]] = {
    **{
        ours: ([name.replace("layer.1.", "layer.2.") for name in theirs], join)
        for ours, (theirs, join) in ENCODER_LAYER.items()
    },
    "pre_cross_attn_layernorm.weight": (["layer.1.layer_norm.weight"], the_only_one),
    "cross_attention.linear_q.weight": ([f"{_CROSS}q.weight"], the_only_one),
    "cross_attention.linear_kv.weight": ([f"{_CROSS}{part}.weight" for part in "kv"], by_head),
    "cross_attention.linear_proj.weight": ([f"{_CROSS}o.weight"], the_only_one),
}


def mapping(layers: int, gated: bool, tied: bool) -> Iterator[tuple[str, list[str], Join]]:
    """Yields each tensor of ours, the names of theirs, and how they are joined."""
    yield "embedding.word_embeddings.weight", ["shared.weight"], the_only_one
    if not tied:
        yield "lm_head.output_layer.weight", ["lm_head.weight"], the_only_one
    for stack, parts in (("encoder", ENCODER_LAYER), ("decoder", DECODER_LAYER)):
        yield f"{stack}.final_layernorm.weight", [f"{stack}.final_layer_norm.weight"], the_only_one
        bias = f"{stack}.block.0.{_ATTENTION}relative_attention_bias.weight"
        yield f"{stack}_relative_pos_emb.relative_attention_bias.weight", [bias], the_only_one
        for number in range(layers):
            for ours, (theirs, join) in parts.items():
                names = [f"{stack}.block.{number}.{name}" for name in theirs]
                if gated and ours == "mlp.linear_fc1.weight":
                    names = [names[0].replace("wi", f"wi_{half}") for half in (0, 1)]
                    join = one_after_the_other
                yield f"{stack}.layers.{number}.{ours}", names, join


def theirs(**settings: Any) -> nn.Module:
    """A model of transformers, in float64, whose weights and norms are all random."""
    torch.manual_seed(3)
    config = transformers.T5Config(
        **{
            "vocab_size": 67,
            "d_model": 24,
            "d_kv": 6,
            "d_ff": 40,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 10,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            **settings,
        }
    )
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    if not settings.get("tie_word_embeddings", True):  # transformers 5 ties them in spite of the config
        model.lm_head.weight = nn.Parameter(torch.randn(model.lm_head.weight.shape, dtype=torch.float64))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
            elif "relative" in name:
                parameter.normal_()
    return model


def ours(model: Any, tied: bool, **settings: Any) -> T5Model:
    """Returns our model with the weights of a model of transformers."""
    their = model.config
    gated = their.feed_forward_proj.startswith("gated")
    config = TransformerConfig(
        num_layers=their.num_decoder_layers,
        hidden_size=their.d_model,
        num_attention_heads=their.num_heads,
        kv_channels=their.d_kv,
        ffn_hidden_size=their.d_ff,
        normalization="RMSNorm",
        layernorm_epsilon=their.layer_norm_epsilon,
        add_bias_linear=False,
        activation_func=gelu_tanh if gated else torch.nn.functional.relu,
        gated_linear_unit=gated,
        softmax_scale=1.0,
        logit_scale=their.d_model**-0.5 if tied else 1.0,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "fp64": True, "use_cpu_initialization": True, **settings},
    )
    made = T5Model(
        config,
        config,
        get_t5_encoder_with_local_block_spec(their.num_layers),
        get_t5_decoder_with_local_block_spec(their.num_decoder_layers),
        their.vocab_size,
        max_sequence_length=64,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="relative",
        relative_attention_num_buckets=their.relative_attention_num_buckets,
        relative_attention_max_distance=their.relative_attention_max_distance,
    )
    state, found = model.state_dict(), made.state_dict()
    for name, names, join in mapping(their.num_layers, gated, tied):
        value = join([state[one] for one in names], their.num_heads)
        assert value.shape == found[name].shape, (name, value.shape, found[name].shape)
        found[name].copy_(value)
    mapped = {name for name, _, _ in mapping(their.num_layers, gated, tied)}
    assert {name for name in found if not name.endswith("output_layer.bias")} == mapped
    return made
