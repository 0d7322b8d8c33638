"""Specs of GPT layers."""

import dataclasses
from collections.abc import Callable

from megatron.core.exceptions import UserError
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.groups.defaults import pp_rank_or_default
from megatron.core.pipeline_parallel.stage_map import StageModules, stage_map
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.replicated import ReplicatedLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_patterns import layer_parts, prediction_letters
from megatron.core.transformer.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.mlp import MLP, LinearBranch, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.query_key_norms import NORMS_OF_HEADS, L2Norm
from megatron.core.transformer.sparse_latent_attention import SparseLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils.warn import warn_on_first_rank


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool | None = False,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    use_kitchen: bool = False,
    use_kitchen_attention: bool = False,
    kitchen_attention_backend: str = "sdpa",
    *,
    norm_placement: str = "pre",
    qk_norm_scope: str = "head",
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
) -> ModuleSpec:
    """Returns the spec of a GPT layer in plain torch. `normalization` and `fp8` have no effect, because the config sets
    both (scripts of two releases pass another value as `fp8`). Our own keywords `norm_placement` and `qk_norm_scope`
    are the config's fields of these names. With `attn_mask_type` padding the layer is that of an encoder, whose tokens
    attend to the tokens on both sides."""
    if fp8:
        warn_on_first_rank(f"fp8={fp8!r} in a layer spec has no effect: the config says what is computed in fp8")
    asked = {"use_kitchen": use_kitchen, "use_kitchen_attention": use_kitchen_attention}
    for name, value in asked.items():
        if value:
            raise UserError(f"not yet: {name} {value} in a layer spec")
    if multi_latent_attention:
        attention = _latent_attention(qk_layernorm, attn_mask_type)
    else:
        attention = _attention(_query_key_norm(qk_layernorm, qk_l2_norm, qk_norm_scope), attn_mask_type)
    return _layer(attention, _mlp(MLP) if num_experts is None else _moe(moe_grouped_gemm), norm_placement)


def _layer(token_mixer: ModuleSpec | None, channel_mixer: ModuleSpec | None, norm_placement: str) -> ModuleSpec:
    """Returns the spec of a layer of these branches, each with its norms; None leaves a branch out."""
    before = IdentityOp if norm_placement in ("post", "post_residual") else WrappedTorchNorm
    behind = WrappedTorchNorm if norm_placement in ("post", "post_residual", "sandwich") else IdentityOp
    submodules = TransformerLayerSubmodules(
        sharded_state_dict_keys_map={
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
    )
    if token_mixer is not None:
        submodules.input_layernorm, submodules.post_attention_layernorm = before, behind
        submodules.self_attention, submodules.self_attn_bda = token_mixer, get_bias_dropout_add
    if channel_mixer is not None:
        submodules.pre_mlp_layernorm = IdentityOp if norm_placement == "parallel" else before
        submodules.post_mlp_layernorm = behind
        submodules.mlp, submodules.mlp_bda = channel_mixer, get_bias_dropout_add
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool | None = False,
    qk_l2_norm: bool | None = False,
    use_te_op_fuser: bool | None = False,
    use_kitchen: bool = False,
    use_te_activation_func: bool = False,
    use_kitchen_attention: bool = False,
    kitchen_attention_backend: str = "sdpa",
) -> ModuleSpec:
    """Returns the spec of `get_gpt_layer_local_spec`, because specs here do not contain Transformer Engine's modules; a
    line says so once. `fp8` has no effect, as in Megatron-LM: the config's value is used. Raises UserError for other
    options that only Transformer Engine has."""
    asked = {"use_te_op_fuser": use_te_op_fuser, "use_te_activation_func": use_te_activation_func}
    for name, value in asked.items():
        if value:
            raise UserError(f"not yet: {name} {value} in a layer spec")
    say_layers_are_ours()
    return get_gpt_layer_local_spec(
        num_experts,
        moe_grouped_gemm,
        qk_layernorm,
        multi_latent_attention,
        fp8,
        moe_use_legacy_grouped_gemm,
        qk_l2_norm=qk_l2_norm,
        use_kitchen=use_kitchen,
        use_kitchen_attention=use_kitchen_attention,
        kitchen_attention_backend=kitchen_attention_backend,
    )


def say_layers_are_ours() -> None:
    """Logs once that a spec of Transformer Engine's layers gives the layers of this package."""
    warn_on_first_rank(
        "layer specs of Transformer Engine: its modules are not used; the layers are those of megatron.core, with the "
        "kernels that --transformer-impl chooses"
    )


def _query_key_norm(qk_layernorm: bool | None, qk_l2_norm: bool | None, scope: str) -> type:
    if qk_layernorm:
        return NORMS_OF_HEADS.get(scope, WrappedTorchNorm)
    return L2Norm if qk_l2_norm else IdentityOp


def _attention(norm: type, attn_mask_type: AttnMaskType) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": attn_mask_type},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention(qk_layernorm: bool | None, attn_mask_type: AttnMaskType) -> ModuleSpec:
    latent_norm = WrappedTorchNorm if qk_layernorm else IdentityOp
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": attn_mask_type},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=latent_norm,
            kv_layernorm=latent_norm,
        ),
    )


def _mlp(module: type) -> ModuleSpec:
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(module=module, submodules=parts)


def _moe(grouped: bool | None) -> ModuleSpec:
    experts = GroupedMLP if grouped else SequentialMLP
    submodules = MoESubmodules(experts=_mlp(experts), shared_experts=_mlp(SharedExpertMLP))
    return ModuleSpec(module=MoELayer, submodules=submodules)


def gpt_layer_spec_of(
    config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType = AttnMaskType.causal
) -> ModuleSpec:
    """Returns the spec of one layer (counted from 1 over the whole model) that a config describes. `attn_mask_type`
    padding makes it the layer of an encoder."""
    mixer, channels = layer_parts(config, layer_number)
    return _layer(
        None if mixer is None else _TOKEN_MIXERS[mixer](config, attn_mask_type),
        None if channels is None else _CHANNEL_MIXERS[channels](config),
        config.norm_placement,
    )


def _attention_of(config: TransformerConfig, attn_mask_type: AttnMaskType) -> ModuleSpec:
    if config.multi_latent_attention:
        return _latent_attention(config.qk_layernorm, attn_mask_type)
    norm = _query_key_norm(config.qk_layernorm, config.qk_l2_norm, config.qk_norm_scope)
    return _attention(norm, attn_mask_type)


def _gated_delta_net(config: TransformerConfig, attn_mask_type: AttnMaskType) -> ModuleSpec:
    if attn_mask_type is not AttnMaskType.causal:
        raise UserError("gated_delta_net layers are causal: their tokens cannot see later ones, as an encoder's do")
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    return ModuleSpec(module=GatedDeltaNet, submodules=parts)


def _sparse_attention(config: TransformerConfig, attn_mask_type: AttnMaskType) -> ModuleSpec:
    if attn_mask_type is not AttnMaskType.causal:
        raise UserError("dsa selects among earlier keys: its tokens cannot see later ones, as an encoder's do")
    return dataclasses.replace(_latent_attention(config.qk_layernorm, attn_mask_type), module=SparseLatentAttention)


def _mamba(config: TransformerConfig, attn_mask_type: AttnMaskType) -> ModuleSpec:
    if attn_mask_type is not AttnMaskType.causal:
        raise UserError("Mamba-2 layers are causal: their tokens cannot see later ones, as an encoder's do")
    parts = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(module=MambaMixer, submodules=parts)


def _linear(config: TransformerConfig, bias: bool | None) -> ModuleSpec:
    """Returns the spec of a linear layer that replaces a branch. `bias`: the branch's own setting of a bias; None:
    `add_bias_linear` decides."""
    return ModuleSpec(module=LinearBranch, params={"bias": config.add_bias_linear if bias is None else bias})


_TOKEN_MIXERS: dict[str, Callable[[TransformerConfig, AttnMaskType], ModuleSpec]] = {
    "attention": _attention_of,
    "gated_delta_net": _gated_delta_net,
    "mamba": _mamba,
    "dsa": _sparse_attention,
    "linear": lambda config, attn_mask_type: _linear(config, config.attention_output_bias),
}
"""For each token mixer of `layer_patterns.LayerParts`: a function (config, attention mask type) -> spec. The module is
built as `self_attention` of a layer; docs/extending.md describes its interface."""

_CHANNEL_MIXERS: dict[str, Callable[[TransformerConfig], ModuleSpec]] = {
    "mlp": lambda config: _mlp(MLP),
    "moe": lambda config: _moe(config.moe_grouped_gemm),
    "linear": lambda config: _linear(config, config.mlp_bias),
}
"""For each channel mixer of `layer_patterns.LayerParts`: a function config -> spec."""


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Returns the specs of a GPT's layers on a pipeline stage, and of its last norm, as the config describes them.
    `pp_rank` defaults to this rank's. `normalization` and `qk_l2_norm` have no effect, because the config sets both.
    With `use_transformer_engine` the layers are the same, and a line says so once."""
    if use_transformer_engine:
        say_layers_are_ours()
    layers = _stage_of_chunk(config, vp_stage, pp_rank).layers
    specs = [gpt_layer_spec_of(config, number) for number in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)


def get_transformer_block_with_experimental_attention_variant_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the specs of `get_gpt_decoder_block_spec`, which also reads `experimental_attention_variant`."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage, pp_rank=pp_rank)


def get_gpt_heterogeneous_layer_spec(
    config: TransformerConfig, use_te: bool = False, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the specs of `get_gpt_decoder_block_spec` for a heterogeneous model. Raises UserError for other
    models."""
    if not config.heterogeneous_block_specs:
        raise UserError(
            "get_gpt_heterogeneous_layer_spec: the config describes layers that are alike; give it "
            "heterogeneous_layers_config_path"
        )
    return get_gpt_decoder_block_spec(config, use_te, vp_stage=vp_stage, pp_rank=pp_rank)


def get_gpt_decoder_layer_specs(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> list[ModuleSpec]:
    """Returns the specs of the layers of all stages of a GPT. Only `config` has an effect; see
    `get_gpt_decoder_block_spec`."""
    if use_transformer_engine:
        say_layers_are_ours()
    return [gpt_layer_spec_of(config, number) for number in range(1, config.num_layers + 1)]


def get_gpt_layer_with_inference_spec(
    qk_layernorm: bool | None = False, multi_latent_attention: bool | None = False, qk_l2_norm: bool | None = False
) -> ModuleSpec:
    """Raises UserError: there is no layer for generation only."""
    raise UserError(
        "get_gpt_layer_with_inference_spec: not yet: layers for generation only (--transformer-impl "
        "inference_optimized); get_gpt_layer_local_spec generates too, with an inference_context"
    )


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    use_transformer_engine: bool,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> ModuleSpec | None:
    """Returns the specs of a pipeline stage's layers of multi-token prediction, or None if the stage has none. Each is
    built like the decoder's last layer, or in a hybrid model by the letters of its pattern. `spec` describes one or all
    of the stage's decoder layers. `pp_rank` defaults to this rank's. `use_transformer_engine` has no effect."""
    depths = _stage_of_chunk(config, vp_stage, pp_rank).prediction_layers
    if not depths:
        return None
    last: ModuleSpec = gpt_layer_spec_of(config, config.num_layers + 1)
    of_hybrid = bool(prediction_letters(config))
    if isinstance(spec, ModuleSpec) and not isinstance(spec.submodules, TransformerBlockSubmodules) and not of_hybrid:
        last = spec
    elif not of_hybrid:
        block = spec if isinstance(spec, TransformerBlockSubmodules) else spec.submodules
        last = block.layer_specs[-1] if block.layer_specs else last
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            # Under sequence parallelism each rank has its own tokens. Gathering both inputs of all tokens costs more
            # than summing a gradient of [h, 2h] once per step.
            eh_proj=ReplicatedLinear if config.sequence_parallel else ColumnParallelLinear,
            transformer_layer=last,
        ),
    )
    submodules = MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * depths)
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=submodules)


def _stage_of_chunk(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None) -> StageModules:
    rank = pp_rank_or_default(pp_rank)
    return stage_map(config).stage_at(rank, vp_stage or 0)
