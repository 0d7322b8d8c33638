"""What a GPT layer is made of."""

from megatron.core.exceptions import UserError
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.pipeline_parallel.stages import stage_map
from megatron.core.process_groups_config import default_collection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


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
) -> ModuleSpec:
    """A GPT layer of plain torch. `normalization` changes nothing: the config's counts."""
    asked = {
        "num_experts": num_experts,
        "multi_latent_attention": multi_latent_attention,
        "fp8": fp8,
        "qk_l2_norm": qk_l2_norm,
        "use_kitchen": use_kitchen,
        "use_kitchen_attention": use_kitchen_attention,
    }
    for name, value in asked.items():
        if value:
            raise UserError(f"not yet: {name} {value} in a layer spec")
    head_norm = WrappedTorchNorm if qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=DotProductAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Specs of the layers of a GPT that a pipeline stage has, and of its last norm. `pp_rank`: default, this rank's."""
    if use_transformer_engine:
        raise UserError("not yet: use_transformer_engine in a block spec; set it to False")
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, qk_l2_norm=qk_l2_norm)
    rank = default_collection().rank("pp") if pp_rank is None else pp_rank
    layers = stage_map(config).part(rank, vp_stage or 0).layers
    return TransformerBlockSubmodules(layer_specs=[layer] * len(layers), layer_norm=WrappedTorchNorm)
