"""Specs of the layers of T5's encoder and decoder."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.cross_attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils.warn import warn_on_first_rank


def encoder_model_with_local_layers() -> ModuleSpec:
    """Returns the spec of an encoder's layer: its tokens attend to the tokens on both sides."""
    return get_gpt_layer_local_spec(attn_mask_type=AttnMaskType.padding)


def decoder_model_with_local_layers() -> ModuleSpec:
    """Returns the spec of a decoder's layer: causal attention, then cross attention to the encoder's output."""
    layer = get_gpt_layer_local_spec()
    layer.submodules.pre_cross_attn_layernorm = WrappedTorchNorm
    layer.submodules.cross_attention = ModuleSpec(
        module=CrossAttention,
        params={"attn_mask_type": AttnMaskType.padding},
        submodules=CrossAttentionSubmodules(
            linear_q=ColumnParallelLinear,
            linear_kv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    layer.submodules.cross_attn_bda = get_bias_dropout_add
    return layer


def get_t5_encoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Returns the specs of an encoder of `num_layers` layers, and of its last norm."""
    return _block(encoder_model_with_local_layers(), num_layers)


def get_t5_decoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Returns the specs of a decoder of `num_layers` layers, and of its last norm."""
    return _block(decoder_model_with_local_layers(), num_layers)


def get_t5_encoder_with_transformer_engine_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Returns `get_t5_encoder_with_local_block_spec`, and says once that these are this package's own layers."""
    _say_local("encoder")
    return get_t5_encoder_with_local_block_spec(num_layers)


def get_t5_decoder_with_transformer_engine_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Returns `get_t5_decoder_with_local_block_spec`, and says once that these are this package's own layers."""
    _say_local("decoder")
    return get_t5_decoder_with_local_block_spec(num_layers)


def _block(layer: ModuleSpec, num_layers: int) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=WrappedTorchNorm)


def _say_local(stack: str) -> None:
    warn_on_first_rank(
        f"get_t5_{stack}_with_transformer_engine_block_spec: there is no Transformer Engine backend; layers of this "
        "package compute the same function"
    )
