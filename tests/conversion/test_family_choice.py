"""An export says the model in config.json or refuses it by name, whichever flags describe the model."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from conversion import saved_models
from conversion.saved_models import LLAMA, VOCAB_SIZE, build_random
from support.each import for_each

from megatron.conversion.family_choice import choose_family
from megatron.core.exceptions import UserError
from megatron.core.parameters import canonical_names, info_of
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.config.conditions import is_inert, is_to_come
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.model import ModelConfig
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.recorded_flags import is_of_run
from megatron.training.inspection.run_description import words_of

config_of = functools.cache(saved_models.config_of)

OF_OTHER_SCRIPTS = (
    "bert_num_tokentypes",
    "decoder_num_layers",
    "encoder_pipeline_model_parallel_size",
    "encoder_tensor_model_parallel_size",
    "relative_attention_max_distance",
    "relative_attention_num_buckets",
    "spec",
)
"""Fields that pretrain_gpt.py refuses: those of BERT and T5, whose families have tests of their own."""

MIXTRAL = f"{LLAMA} --num-experts 4 --moe-router-topk 2"

DEEPSEEK = (
    f"{MIXTRAL} --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
    "--qk-layernorm --latent-layernorm-epsilon 1e-6 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16"
)
DELTA = "--experimental-attention-variant gated_delta_net --linear-num-key-heads 4 --linear-num-value-heads 4"
SPARSE = (
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 4 "
    "--q-lora-rank 12"
)
QWEN3_NEXT = (
    f"{MIXTRAL} {DELTA} --qk-layernorm --attention-output-gate --apply-layernorm-1p --moe-shared-expert-gate "
    "--moe-shared-expert-intermediate-size 16"
)
OFFLOADING = "--fine-grained-activation-offloading --offload-modules core_attn"
HYBRID = "--mamba-head-dim 8 --mamba-num-groups 2"
NEMOTRON = (
    f"{HYBRID} --squared-relu --disable-bias-linear --normalization RMSNorm --position-embedding-type none "
    "--untie-embeddings-and-output-weights"
)
DESCRIPTION = Path(__file__).parents[1] / "data/heterogeneous_layers.json"
DESCRIBED = '{"block_configs":[{"ffn":{"no_op":true}},{}]}'
SIGMOID = "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "activation_func_clamp_value": ("--quick-geglu --activation-func-clamp-value 0.1",),
    "alibi": ("--alibi", "--alibi --position-embedding-type none"),
    "alibi_factor": ("--alibi --alibi-factor 0.5 --position-embedding-type none",),
    "attention_chunk_size": ("--attention-chunk-size 4",),
    "attention_chunk_skip_freq": ("--attention-chunk-size 4 --attention-chunk-skip-freq 2",),
    "attention_dropout": ("--attention-dropout 0.25",),
    "attn_logit_softcapping": ("--attn-logit-softcapping 0.5",),
    "beta_fast": ("--beta-fast 20",),
    "beta_slow": ("--beta-slow 0.5",),
    "cache_mla_latents": ("--cache-mla-latents",),
    "kv_lora_rank": ("--kv-lora-rank 12",),
    "latent_layernorm_epsilon": ("--latent-layernorm-epsilon 1e-2", "--norm-epsilon 1e-2"),
    "mscale": ("--mscale 0.5", "--mscale 0.5 --mscale-all-dim 0.7", "--mscale 0 --mscale-all-dim 1"),
    "mscale_all_dim": ("--mscale-all-dim 0.7",),
    "original_max_position_embeddings": ("--original-max-position-embeddings 8",),
    "q_lora_rank": ("--q-lora-rank 12",),
    "qk_head_dim": ("--qk-head-dim 12",),
    "qk_pos_emb_head_dim": ("--qk-pos-emb-head-dim 8",),
    "rotary_scaling_factor": ("--rotary-scaling-factor 3", "--rotary-scaling-factor 3 --rope-type rope"),
    "v_head_dim": ("--v-head-dim 12",),
    "clip_qkv": ("--clip-qkv 0.1",),
    "config_logger_dir": ("--config-logger-dir somewhere",),
    "cp_comm_type": ("--cp-comm-type a2a",),
    "embedding_init_method_std": ("--embedding-init-method-std 0.5",),
    "embedding_multiplier": ("--embedding-multiplier 3.0",),
    "encoder_num_layers": ("--encoder-num-layers 2",),
    "ffn_hidden_size": ("--ffn-hidden-size 48",),
    "final_logit_softcapping": ("--final-logit-softcapping 0.5",),
    "glu_linear_offset": ("--quick-geglu --glu-linear-offset 1.0", "--glu-linear-offset 1.0"),
    "heterogeneous_layers_config_encoded_json": (f"--heterogeneous-layers-config-encoded-json {DESCRIBED}",),
    "heterogeneous_layers_config_path": (f"--heterogeneous-layers-config-path {DESCRIPTION}",),
    "hidden_dropout": ("--hidden-dropout 0.25",),
    "hidden_size": ("--hidden-size 48",),
    "hybrid_attention_ratio": (f"{HYBRID} --hybrid-attention-ratio 0.5",),
    "hybrid_layer_pattern": (f"{HYBRID} --hybrid-layer-pattern M*",),
    "hybrid_mlp_ratio": (f"{HYBRID} --hybrid-mlp-ratio 0.5",),
    "init_method_std": ("--init-method-std 0.5",),
    "kv_channels": ("--kv-channels 12",),
    "layernorm_epsilon": ("--norm-epsilon 0.5",),
    **{
        field: (f"{DELTA} --{field.replace('_', '-')} {value}",)
        for field, value in {
            "linear_attention_freq": 2,
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 5,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 8,
        }.items()
    },
    **{
        field: (f"{SPARSE} --{field.replace('_', '-')} {value}",)
        for field, value in {
            "dsa_indexer_n_heads": 2,
            "dsa_indexer_head_dim": 6,
            "dsa_indexer_topk": 2,
            "dsa_indexer_loss_coeff": 0.1,
            "dsa_indexer_k_norm_epsilon": 0.1,
        }.items()
    },
    "dsa_indexer_use_sparse_loss": (f"{SPARSE} --dsa-indexer-loss-coeff 0.1 --dsa-indexer-use-sparse-loss",),
    "dsa_indexer_rope_interleaved": (f"{SPARSE} --dsa-indexer-rope-interleaved",),
    "dsa_indexer_scoring_relu": (f"{SPARSE} --disable-dsa-indexer-scoring-relu",),
    "logit_scale": ("--logit-scale 0.5",),
    "is_hybrid_model": (f"{HYBRID} --is-hybrid-model",),
    "mamba_conv_kernel_dim": (f"{HYBRID} --is-hybrid-model --mamba-conv-kernel-dim 3",),
    "mamba_head_dim": ("--is-hybrid-model --mamba-head-dim 8",),
    "mamba_min_time_step": (f"{HYBRID} --is-hybrid-model --mamba-min-time-step 0.1",),
    "mamba_num_groups": ("--is-hybrid-model --mamba-head-dim 8 --mamba-num-groups 4",),
    "mamba_num_heads": (f"{HYBRID} --is-hybrid-model --mamba-num-heads 4",),
    "mamba_state_dim": (f"{HYBRID} --is-hybrid-model --mamba-state-dim 8",),
    "make_vocab_size_divisible_by": ("--make-vocab-size-divisible-by 16",),
    "max_position_embeddings": ("--max-position-embeddings 32",),
    "min_offloaded_tensor_size": (f"{OFFLOADING} --min-offloaded-tensor-size 8",),
    "mlp_chunks_for_prefill": ("--mlp-chunks-for-prefill 2",),
    "moe_aux_loss_coeff": ("--moe-aux-loss-coeff 0.1",),
    "moe_expert_capacity_factor": ("--moe-expert-capacity-factor 0.5",),
    "moe_ffn_hidden_size": ("--moe-ffn-hidden-size 24",),
    "moe_input_jitter_eps": ("--moe-input-jitter-eps 0.1",),
    "moe_latent_size": ("--moe-latent-size 16",),
    "moe_layer_freq": ("--moe-layer-freq 2", "--moe-layer-freq [0,1]", "--moe-layer-freq [1,1]"),
    "moe_pad_expert_input_to_capacity": ("--moe-expert-capacity-factor 0.5 --moe-pad-expert-input-to-capacity",),
    "moe_router_bias_update_rate": (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1",
    ),
    "moe_router_enable_expert_bias": ("--moe-router-score-function sigmoid --moe-router-enable-expert-bias",),
    "moe_router_group_score_topk": (
        "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-group-score-topk 1",
    ),
    "moe_router_group_topk": ("--moe-router-num-groups 2 --moe-router-group-topk 1",),
    "moe_router_load_balancing_type": (
        "--moe-router-load-balancing-type sinkhorn",
        "--moe-router-load-balancing-type none",
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.1",
    ),
    "moe_router_norm_topk_prob": (
        "--moe-router-norm-topk-prob",
        "--moe-router-pre-softmax --moe-router-norm-topk-prob",
        "--moe-router-pre-softmax --no-moe-router-norm-topk-prob",
        "--moe-router-pre-softmax --moe-router-norm-topk-prob --qk-layernorm --moe-router-topk 1",
    ),
    "moe_router_num_groups": ("--moe-router-num-groups 2 --moe-router-group-topk 1",),
    "moe_router_pre_softmax": (
        "--moe-router-pre-softmax",
        "--moe-router-pre-softmax --qk-layernorm",
        "--moe-router-pre-softmax --qk-layernorm --moe-router-topk 1",
    ),
    "moe_router_topk": ("--moe-router-topk 3", "--moe-router-topk 1 --moe-router-pre-softmax"),
    "moe_router_topk_scaling_factor": ("--moe-router-topk-scaling-factor 2.0",),
    "moe_shared_expert_gate": ("--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",),
    "moe_shared_expert_intermediate_size": ("--moe-shared-expert-intermediate-size 16",),
    "moe_shared_expert_overlap": (
        "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap --moe-token-dispatcher-type alltoall",
    ),
    "moe_token_drop_policy": ("--moe-expert-capacity-factor 0.5 --moe-token-drop-policy position",),
    "moe_upcycling_granularity": ("--moe-use-upcycling --load somewhere --moe-upcycling-granularity 1",),
    "moe_use_upcycling": ("--moe-use-upcycling --load somewhere",),
    "moe_z_loss_coeff": ("--moe-z-loss-coeff 0.1",),
    "moe_apply_probs_on_input": (
        "--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax --qk-layernorm",
    ),
    "mtp_hybrid_override_pattern": (f"{HYBRID} --hybrid-layer-pattern M* --mtp-hybrid-override-pattern M",),
    "mtp_loss_scaling_factor": ("--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5",),
    "mtp_num_layers": ("--mtp-num-layers 1",),
    "mtp_use_repeated_layer": ("--mtp-num-layers 2 --mtp-use-repeated-layer",),
    "mtp_detach_heads": ("--mtp-num-layers 1 --mtp-detach-heads",),
    "mamba_training_ssm_states_dtype": (f"{HYBRID} --is-hybrid-model --mamba-training-ssm-states-dtype bf16",),
    "no_rope_freq": ("--no-rope-freq 2",),
    "mup_attn_scale_power": ("--use-mup --mup-attn-scale-power 0.25",),
    "mup_base_head_dim": ("--use-mup --mup-base-head-dim 4",),
    "mup_base_hidden_size": ("--use-mup --mup-base-hidden-size 8",),
    "mup_embedding_mult": ("--use-mup --mup-embedding-mult 3",),
    "mup_output_mult": ("--use-mup --mup-output-mult 0.5",),
    "nope_temperature_floor": ("--no-rope-freq 2 --nope-temperature-scale 0.1 --nope-temperature-floor 4",),
    "nope_temperature_scale": ("--no-rope-freq 2 --nope-temperature-scale 0.1 --nope-temperature-floor 4",),
    "norm_bias": ("--no-norm-bias", "--no-norm-bias --normalization LayerNorm"),
    "num_attention_heads": ("--num-attention-heads 4",),
    "num_layers": ("--num-layers 1",),
    "num_moe_experts": ("--num-experts 2",),
    "num_query_groups": (
        "--group-query-attention --num-query-groups 1",
        "--group-query-attention --num-query-groups 2",
    ),
    "group_query_attention": ("--group-query-attention --num-query-groups 1",),
    "offload_modules": (OFFLOADING,),
    "fine_grained_activation_offloading": (OFFLOADING,),
    "activation_offload_fraction": (f"{OFFLOADING} --activation-offload-fraction 0.5",),
    "delta_offload_bytes_across_pp_ranks": (f"{OFFLOADING} --delta-offload-bytes-across-pp-ranks 8",),
    "fine_grained_offloading_max_inflight_offloads": (
        f"{OFFLOADING} --fine-grained-offloading-max-inflight-offloads 2",
    ),
    "cpu_offloading_num_layers": ("--cpu-offloading-num-layers 1",),
    "cpu_offloading_retain_pinned_cpu_buffers": ("--cpu-offloading-retain-pinned-cpu-buffers",),
    "qk_clip_alpha": ("--qk-clip --qk-clip-alpha 0.25",),
    "qk_clip_threshold": ("--qk-clip --qk-clip-threshold 1",),
    "qk_l2_norm_epsilon": ("--qk-l2-norm --qk-l2-norm-epsilon 0.1",),
    "qk_norm_scope": (
        "--qk-layernorm --qk-norm-scope full",
        "--qk-layernorm --normalization LayerNorm --no-norm-bias --qk-norm-scope per_head",
    ),
    "recompute_granularity": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",),
    "recompute_method": ("--recompute-granularity full --recompute-method block --recompute-num-layers 1",),
    "recompute_modules": ("--recompute-granularity selective --recompute-modules core_attn",),
    "recompute_num_layers": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",),
    "distribute_saved_activations": (),
    "residual_multiplier": ("--residual-multiplier 0.5",),
    "rope_scaling_attention_factor": (
        "--rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-original-length 8 "
        "--rope-scaling-attention-factor 1.5",
    ),
    "rope_scaling_beta_fast": (
        "--rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-original-length 8 --rope-scaling-beta-fast 2",
    ),
    "rope_scaling_beta_slow": (
        "--rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-original-length 8 --rope-scaling-beta-slow .1",
    ),
    "rope_scaling_factor": (
        "--use-rope-scaling --rope-scaling-factor 3",
        "--rope-scaling-type linear --rope-scaling-factor 3",
    ),
    "rope_scaling_high_freq_factor": ("--use-rope-scaling --rope-scaling-high-freq-factor 3",),
    "rope_scaling_long_factor": (
        "--rope-scaling-type longrope --rope-scaling-factor 2 --rope-scaling-original-length 8 "
        "--rope-scaling-short-factor 1 1 1 1 1 1 1 1 --rope-scaling-long-factor 1 2 3 4 5 6 7 8",
    ),
    "rope_scaling_low_freq_factor": ("--use-rope-scaling --rope-scaling-low-freq-factor 2",),
    "rope_scaling_original_length": ("--use-rope-scaling --rope-scaling-original-length 64",),
    "rope_scaling_short_factor": (
        "--rope-scaling-type longrope --rope-scaling-factor 2 --rope-scaling-original-length 8 "
        "--rope-scaling-short-factor 1 2 3 4 5 6 7 8 --rope-scaling-long-factor 1 2 3 4 5 6 7 8",
    ),
    "rope_scaling_truncate": (
        "--rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-original-length 8 --no-rope-scaling-truncate",
    ),
    "rope_scaling_type": tuple(
        f"--rope-scaling-type {kind} --rope-scaling-factor 4 --rope-scaling-original-length 8"
        for kind in ("linear", "dynamic", "llama3", "yarn")
    ),
    "use_rope_scaling": ("--use-rope-scaling", "--use-rope-scaling --rope-scaling-type llama3"),
    "rotary_base": ("--rotary-base 500",),
    "rotary_base_local": ("--add-qkv-bias --window-size 3,0 --window-attn-skip-freq 2 --rotary-base-local 500",),
    "rotary_percent": ("--rotary-percent 0.5",),
    "rotary_seq_len_interpolation_factor": ("--rotary-seq-len-interpolation-factor 3",),
    "softmax_scale": ("--softmax-scale 1.0",),
    "window_attn_skip_freq": (
        "--window-size 3,0 --window-attn-skip-freq 2",
        "--window-size 3,0 --window-attn-skip-freq [1,1]",
        "--add-qkv-bias --window-size 3,0 --window-attn-skip-freq 2",
    ),
    "window_size": ("--window-size 3,0", "--window-size 3,1", "--window-size 15,0"),
    "wgrad_deferral_limit": ("--wgrad-deferral-limit 2",),
    "position_embedding_type": ("--position-embedding-type none", "--position-embedding-type learned_absolute"),
}
"""Flags to try for a field. A switch, and a field with choices, needs none: all its values are tried."""

WITHOUT = {"swiglu": "--swiglu", "add_bias_linear": "--disable-bias-linear"}
"""Fields whose other value is what a run has without a flag of the base."""


def walked_fields() -> list[str]:
    """The fields of TransformerConfig, and of what else the model is built from."""
    fields = [field.name for config in (MLATransformerConfig, ModelConfig) for field in dataclasses.fields(config)]
    return [name for name in dict.fromkeys(fields) if name in flag_table() and _is_for_gpt(flag_table()[name])]


def _is_for_gpt(flag: Flag) -> bool:
    """Fields that GPT does not read are those of test_bert.py and test_t5.py."""
    return flag.declaration.families is None or "gpt" in flag.declaration.families


def examples_of(flag: Flag, base: str) -> tuple[str, ...]:
    """Flags that give the field other values than the base has."""
    if flag.field in EXAMPLES:
        return EXAMPLES[flag.field]
    values = flag.choices or () if flag.switch is None else dict.fromkeys(flag.switch.values())
    before = config_of(base).flat().get(flag.field)
    return tuple(" ".join(words_of(flag, value)) for value in values if value != before)


def tries(flag: Flag) -> list[str]:
    """The flags of each example of a field, as far as a run accepts them."""
    if flag.field in WITHOUT:
        return [LLAMA.replace(WITHOUT[flag.field], ""), MIXTRAL.replace(WITHOUT[flag.field], "")]
    latent = flag.group == "multi-latent attention" or flag.field.startswith("dsa")
    base = MIXTRAL if "moe" in flag.field else DEEPSEEK if latent else LLAMA
    without_activation = LLAMA.replace("--swiglu", "")
    found = []
    for example in examples_of(flag, base):
        for flags in (f"{base} {example}", f"{without_activation} {example}"):
            with contextlib.suppress(UserError):
                config_of(flags)
                found.append(flags)
                break
    return found


@functools.cache
def logits_and_shapes(flags: str) -> tuple[torch.Tensor, dict[str, tuple[int, ...]]]:
    """What a model of these flags computes, and its canonical tensors."""
    model = build_random(config_of(flags))
    tokens = torch.randint(VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(1))
    shapes = {info_of(parameter).name: info_of(parameter).global_shape for _, parameter in canonical_names(model)}
    with torch.no_grad():
        return model(tokens), shapes


def read_back(config: PretrainConfig) -> str:
    """The flags that an import reads in the config.json that an export of this model has."""
    family = choose_family(config, None)
    fields = family.fields_of(family.config_of(config.flat()))
    return " ".join(word for name, value in fields.items() for word in words_of(flag_table()[name], value))


@for_each(walked_fields())
def test_every_field_is_in_config_json_or_refused_by_name(field: str) -> None:
    """What is exported computes the same when it is read back; what is not exported is refused by a flag's name.

    A new field that fails for want of an example needs one in EXAMPLES.
    """
    flag = flag_table()[field]
    if field in OF_OTHER_SCRIPTS:
        assert tries(flag) == []
    elif not is_of_run(flag) and not is_to_come(flag) and not is_inert(flag):
        found = tries(flag)
        assert found, f"EXAMPLES has no example of {field}"
        for flags in found:
            check_read_back(flags)


def check_read_back(flags: str) -> None:
    try:
        again = read_back(config_of(flags))
    except UserError as error:
        assert "--" in str(error), (flags, str(error))
        return
    (before, shapes), (after, shapes_again) = logits_and_shapes(flags), logits_and_shapes(again)
    assert shapes == shapes_again, flags
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5, msg=flags)


def refused_by_name(flag: str, flags: str, architecture: str | None = None) -> None:
    with pytest.raises(UserError, match=flag):
        choose_family(config_of(flags), architecture)


@pytest.mark.parametrize(
    ("flags", "architecture"),
    [
        (f"{MIXTRAL} --moe-router-pre-softmax --moe-router-norm-topk-prob", "MixtralForCausalLM"),
        (f"{MIXTRAL} --qk-layernorm --moe-router-pre-softmax --moe-router-norm-topk-prob", "Qwen3MoeForCausalLM"),
        (f"{MIXTRAL} --qk-layernorm --moe-router-pre-softmax --moe-router-topk 1", "Qwen3MoeForCausalLM"),
        (LLAMA.replace("--disable-bias-linear", ""), "LlamaForCausalLM"),
        (f"{LLAMA} --add-qkv-bias --attention-output-bias --mlp-bias", "LlamaForCausalLM"),
        (f"{LLAMA} --use-rope-scaling", "LlamaForCausalLM"),
        (f"{LLAMA} --rotary-seq-len-interpolation-factor 2", "LlamaForCausalLM"),
        (f"{LLAMA} --window-size 3,0 --window-attn-skip-freq [1,1]", "MistralForCausalLM"),
        (f"{LLAMA} --group-query-attention --num-query-groups 2", "LlamaForCausalLM"),
        (f"{LLAMA} --softmax-scale 0.25", "LlamaForCausalLM"),
        (f"{LLAMA} --rotary-percent 0.5", "Phi3ForCausalLM"),
        (f"{LLAMA} --residual-multiplier 0.5 --softmax-scale 0.3 --logit-scale 0.3", "GraniteForCausalLM"),
        ("--openai-gelu", "GPT2LMHeadModel"),
        ("--no-bias-gelu-fusion --position-embedding-type rope --norm-placement parallel", "FalconForCausalLM"),
        (f"{MIXTRAL} --moe-ffn-hidden-size 24 --ffn-hidden-size 64", "MixtralForCausalLM"),
        (DEEPSEEK, "DeepseekV3ForCausalLM"),
        (f"{DEEPSEEK} --moe-router-norm-topk-prob --moe-layer-freq [0,1]", "DeepseekV3ForCausalLM"),
        (f"{DEEPSEEK} --mtp-num-layers 2", "DeepseekV3ForCausalLM"),
        (f"{DEEPSEEK} {SPARSE} --dsa-indexer-k-norm-epsilon 1e-6", "DeepseekV32ForCausalLM"),
        (
            f"{DEEPSEEK} {SPARSE} --dsa-indexer-k-norm-epsilon 1e-6 --dsa-indexer-loss-coeff 0.1 "
            "--dsa-indexer-use-sparse-loss --moe-layer-freq [1,0] --mtp-num-layers 1",
            "DeepseekV32ForCausalLM",
        ),
        (f"{NEMOTRON} --is-hybrid-model", "Mamba2ForCausalLM"),
        (f"{NEMOTRON} --hybrid-attention-ratio 0.5", "NemotronHForCausalLM"),
        (f"{NEMOTRON} --hybrid-layer-pattern M|-", "NemotronHForCausalLM"),
        (
            f"{NEMOTRON} --hybrid-layer-pattern ME --moe-shared-expert-intermediate-size 24 {SIGMOID}",
            "NemotronHForCausalLM",
        ),
        (f"{QWEN3_NEXT} --linear-attention-freq 2", "Qwen3NextForCausalLM"),
    ],
)
def test_another_spelling_of_the_same_function_is_exported(flags: str, architecture: str) -> None:
    assert choose_family(config_of(flags), None).architecture == architecture


def test_sinkhorn_and_capacity_are_refused_for_every_architecture() -> None:
    for flags in ("--moe-router-load-balancing-type sinkhorn", "--moe-expert-capacity-factor 1.0"):
        for architecture in (None, "MixtralForCausalLM", "Qwen3MoeForCausalLM"):
            refused_by_name(flags.split()[0], f"{MIXTRAL} {flags}", architecture)
    assert choose_family(config_of(f"{MIXTRAL} --moe-expert-capacity-factor -1"), None)  # no limit


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            LLAMA.replace("RMSNorm", "LayerNorm"),
            "LlamaForCausalLM is the nearest.*--normalization is RMSNorm for Llama",
        ),
        (
            f"{LLAMA} --softmax-type off-by-one",
            "--softmax-type is vanilla for LlamaForCausalLM and off-by-one in the ch",
        ),
        (
            f"{LLAMA} --no-rope-freq 2 --nope-temperature-scale 0.1",
            "--no-rope-freq is not set for LlamaForCausalLM and 2 in the checkpoint",
        ),
        (
            f"{NEMOTRON} --hybrid-layer-pattern M* --window-size 3,0",
            "--window-size is not set for NemotronHForCausalLM and",
        ),
        (f"{LLAMA} {DELTA}", "^Qwen3_5ForCausalLM is the nearest architecture, but: --apply-layernorm-1p is"),
        (f"{DEEPSEEK} {SPARSE}", "--dsa-indexer-k-norm-epsilon is 1e-06 for DeepseekV32ForCausalLM and not set in"),
        (
            f"{DEEPSEEK} {SPARSE.replace('--q-lora-rank 12', '')}",
            "DeepseekV32ForCausalLM is the nearest.*q_lora_rank is None",
        ),
        (f"{LLAMA} --window-size 3,1", "--window-size is not set for .* and 3 1 in the checkpoint"),
        (
            f"{MIXTRAL} --qk-layernorm --moe-layer-freq 2 --window-size 3,1",
            "Qwen3MoeForCausalLM is the nearest.*--window-size is not set for .* and 3 1 in the checkpoint",
        ),
    ],
)
def test_a_refusal_names_the_nearest_architecture_and_the_flags(flags: str, said: str) -> None:
    refused_by_name(said, flags)


def test_settings_that_no_architecture_has_are_one_sentence() -> None:
    """Latent attention changes twenty flags; a list of them would not help."""
    refused_by_name(
        r"^no .* is a GPT .*with multi-token prediction \(--mtp-num-layers\) and without experts: LlamaForCausalLM, ",
        f"{LLAMA} --mtp-num-layers 1",
    )
    refused_by_name(
        r"^no architecture that can be exported is a GPT with latent attention \(--multi-latent-attention\) and "
        "without experts: LlamaForCausalLM, ",
        f"{LLAMA} --multi-latent-attention",
    )


def test_biases_that_balance_experts_belong_to_one_architecture() -> None:
    assert choose_family(config_of(DEEPSEEK), None).architecture == "DeepseekV3ForCausalLM"
    without = DEEPSEEK.replace("--moe-router-enable-expert-bias ", "")
    refused_by_name("DeepseekV3ForCausalLM has biases that balance experts", without)
    mixtral = f"{MIXTRAL} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    refused_by_name("--moe-router-", mixtral)


def test_a_named_architecture_expresses_the_model_or_is_refused() -> None:
    assert choose_family(config_of(LLAMA), "MistralForCausalLM").architecture == "MistralForCausalLM"
    said = (
        "Qwen3ForCausalLM was asked for, but: --qk-layernorm is True for Qwen3ForCausalLM and False in the checkpoint"
    )
    refused_by_name(said, LLAMA, "Qwen3ForCausalLM")
    refused_by_name(
        r"GPT9 is unknown; docs/extending.md says how to add it; these are known .*: LlamaForCausalLM, ", LLAMA, "GPT9"
    )
