"""Small models whose texts depend on all that they have read, in float64."""

import torch
from support.tiny_models import tiny_gpt

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 3,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 4,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 3,
}
MODELS = {
    "learned": ({}, {}),
    "rope, grouped": ({"num_query_groups": 2}, {"position_embedding_type": "rope"}),
    "window": ({"window_size": (3, 0)}, {"position_embedding_type": "rope"}),
    "sink": ({"softmax_type": "learnable"}, {"position_embedding_type": "none"}),
    "chunks, no positions in every other layer": (
        {
            "attention_chunk_size": 4,
            "attention_chunk_skip_freq": 2,
            "no_rope_freq": 2,
            "qk_l2_norm": True,
            "nope_temperature_scale": 0.5,
            "nope_temperature_floor": 3,
        },
        {"position_embedding_type": "rope"},
    ),
    "ALiBi, bounded, a gate": (
        {"alibi": True, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention_output_gate": True},
        {"position_embedding_type": "none"},
    ),
    "a base for windows": (
        {"window_size": (3, 0), "window_attn_skip_freq": 2, "rotary_base_local": 10.0, "norm_placement": "parallel"},
        {"position_embedding_type": "rope"},
    ),
    "gated delta nets": (
        {**DELTA, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 3},
        {"position_embedding_type": "rope"},
    ),
    "hybrid": (
        {**DELTA, "hybrid_layer_pattern": "MG*", "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 3},
        {"position_embedding_type": "none"},
    ),
    "latent": (LATENT, {"position_embedding_type": "rope"}),
    "latents in the cache, queries at once": (
        {**LATENT, "q_lora_rank": None, "rope_type": "rope", "cache_mla_latents": True},
        {"position_embedding_type": "rope"},
    ),
    "latents in the cache, sinks, no positions in every other layer": (
        {
            **LATENT,
            "cache_mla_latents": True,
            "softmax_type": "learnable",
            "no_rope_freq": 2,
            "rotary_scaling_factor": 4,
            "original_max_position_embeddings": 8,
            "mscale_all_dim": 0.8,
        },
        {"position_embedding_type": "rope"},
    ),
    "sparse": (
        {
            **LATENT,
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": 6,
            "dsa_indexer_head_dim": 6,
            "dsa_indexer_topk": 3,
        },
        {"position_embedding_type": "rope"},
    ),
}


def build(settings: dict, model: dict) -> GPTModel:
    kind = MLATransformerConfig if "multi_latent_attention" in settings else TransformerConfig
    config = kind(num_layers=3, hidden_size=16, num_attention_heads=4, fp64=True, **settings)
    gpt = tiny_gpt(config, 37, 24, **model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in gpt.parameters():
            scale = 1.5 if parameter.dim() > 1 else 0.2  # so that what is written depends on all that was read
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
            if parameter.info.name.endswith("layernorm.weight"):
                parameter.add_(1.0)
    return gpt.eval()


def build_in_layout(settings: dict, groups: ProcessGroupCollection) -> GPTModel:
    """The chunk of this rank, with weights that do not depend on the layout."""
    sizes = {
        "tensor_model_parallel_size": groups.size("tp"),
        "pipeline_model_parallel_size": groups.size("pp"),
        "expert_model_parallel_size": groups.size("ep"),
        "pipeline_dtype": torch.float64,
    }
    shape = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "init_method_std": 1.5, "fp64": True}
    config = TransformerConfig(**shape, **sizes, **settings)
    ends = {"pre_process": groups.rank("pp") == 0, "post_process": groups.rank("pp") == groups.size("pp") - 1}
    spec = get_gpt_decoder_block_spec(config, False, pp_rank=groups.rank("pp"))
    more = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": True, "pg_collection": groups}
    return GPTModel(config, spec, vocab_size=36, max_sequence_length=24, **ends, **more).eval()
