"""Describes a run in its checkpoints, and compares another run with such a description."""

import platform
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.declarations.config_fields import value_text
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import has_heads, without_stages
from megatron.training.config.conditions import UNKNOWN, lacking, needs_of, ways_of
from megatron.training.config.flag_table import Flag, flag_table, spelling_of
from megatron.training.config.model import ACTIVATIONS
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.recorded_flags import read_recorded, recorded_words
from megatron.training.config.retired import Occurrence
from megatron.training.config.settings import CHOSEN
from megatron.training.config.training import SOURCES_OF_FLAGS
from megatron.training.inspection.gpt_spelling import Renaming, in_one_spelling, renaming

ARCHITECTURE = (
    *("num_layers", "num_encoder_layers", "hidden_size", "ffn_hidden_size"),
    *("num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
    *("add_bias_linear", "add_qkv_bias"),
    *("gated_linear_unit", "activation_func", "glu_linear_offset", "activation_func_clamp_value"),
    "apply_residual_connection_post_layernorm",
    *("position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved"),
    *("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor", "no_rope_freq"),
    *("softmax_scale", "softmax_type", "qk_layernorm", "qk_l2_norm", "attention_output_gate"),
    *("window_size", "window_attn_skip_freq"),
    "untie_embeddings_and_output_weights",
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    *("dsa_indexer_k_norm_epsilon", "dsa_indexer_rope_interleaved", "dsa_indexer_scoring_relu"),
    *("linear_attention_freq", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("hybrid_layer_pattern", "heterogeneous_layers_config_encoded_json"),
    *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
    *("mamba_conv_kernel_dim", "mamba_min_time_step"),
    *("num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size"),
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
    *("mtp_num_layers", "mtp_use_repeated_layer"),
)
"""Fields that determine the computed function: with another value, the same weights are another model."""

OF_ADAPTERS = ("lora_rank", "lora_alpha", "lora_target_modules", "use_rslora", "use_dora")
"""Fields that determine the adapters of a model, which the model that they adapt does not have."""

MODEL_OPTIONS = (
    *("attn_logit_softcapping", "attention_chunk_size", "attention_chunk_skip_freq"),
    *(
        "clip_qkv",
        "qk_norm_scope",
        "qk_l2_norm_epsilon",
        "alibi",
        "alibi_factor",
        "nope_temperature_scale",
        "nope_temperature_floor",
    ),
    *("norm_placement", "first_input_norm", "embedding_norm", "norm_affine", "norm_bias"),
    *("attention_output_bias", "mlp_bias"),
    *("embedding_multiplier", "residual_multiplier", "logit_scale", "final_logit_softcapping"),
    *("normalize_output_weight", "output_layer_bias"),
    *("rope_scaling_type", "rope_scaling_original_length"),
    *("rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
    *("rope_scaling_beta_fast", "rope_scaling_beta_slow", "rope_scaling_truncate"),
    *("rope_scaling_short_factor", "rope_scaling_long_factor", "rope_scaling_attention_factor"),
    *("rotary_base_local", "latent_layernorm_epsilon"),
    *("moe_expert_mlp_bias", "moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *("moe_apply_probs_on_input", "moe_router_norm_topk_prob", "moe_router_bias", "moe_router_group_score_topk"),
    *("bert_binary_head", "bert_num_tokentypes", "bert_head_activation", "bert_head_bias"),
    *("t5_head_bias", "relative_attention_num_buckets", "relative_attention_max_distance"),
    *OF_ADAPTERS,
)
"""More such fields, which few models use. Only values other than the defaults are described, so a checkpoint from
before there was such a model option counts as one with the default."""


_PATTERN = "hybrid_layer_pattern"
_OF_HEADS = ("num_attention_heads", "num_query_groups", "kv_channels")
"""Fields that a model without attention does not read."""


def describe_run(config: PretrainConfig) -> dict[str, object]:
    """Returns a JSON object: the flags that were given, the model family (that of the entry script, or None), the
    architecture in effect, versions of torch and Python."""
    return {
        "command_line": command_line_of(config),
        "model_family": config.model.model_family,
        "architecture": architecture_of(config),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def architecture_of(config: PretrainConfig) -> dict[str, object]:
    """Returns the architecture by field name, as JSON values, without fields that this model does not use (such as
    `rotary_base` with learned positions)."""
    values = config.flat()
    values[_PATTERN] = without_stages(values[_PATTERN])
    turned = [
        name for name in MODEL_OPTIONS if values.get(name, flag_table()[name].default) != flag_table()[name].default
    ]
    unread = () if has_heads(config.transformer) else _OF_HEADS
    fields = [name for name in (*ARCHITECTURE, *turned) if name not in unread and _matters(name, values)]
    return {name: _json_value(values[name]) for name in fields}


def _matters(field: str, values: Mapping[str, object]) -> bool:
    flag = flag_table().get(field)
    families = flag.declaration.families if flag is not None else None
    if families is not None and (values.get("model_family") or "gpt") not in families:
        return False
    return flag is None or lacking(flag, lambda name: values.get(name, UNKNOWN)) is None


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return value.__name__ if callable(value) and hasattr(value, "__name__") else value_text(value)


def command_line_of(config: PretrainConfig, fields: Container[str] | None = None) -> list[str]:
    """Returns words that give this config, or these fields of it: every setting that a flag, a config file or the
    script chose. A script's own flags are left out."""
    values = config.flat()
    words: list[str] = []
    for field, flag in flag_table().items():
        wanted = field in values and field not in SOURCES_OF_FLAGS if fields is None else field in fields
        if wanted and config.provenance.get(field) in CHOSEN:
            words += words_of(flag, values[field])
    return words


def words_of(flag: Flag, value: object) -> Iterator[str]:
    """Yields the words that give a flag this value; nothing if no words give it."""
    if flag.switch is not None:
        spellings = [spelling for spelling, sets in flag.switch.items() if sets == value]
        yield from spellings[:1]
        return
    words = value_words(flag, value)
    if words or (flag.nargs == "*" and value is not None):
        yield from Occurrence(flag.spelling, tuple(words)).as_words()


def value_words(flag: Flag, value: Any) -> list[str]:
    """Returns the words behind a flag that is no switch; none for None."""
    if value is None:
        return []
    items = value if flag.nargs is not None and isinstance(value, list | tuple) else [value]
    return [flag.word_of(item) for item in items]


OF_EXPERTS = frozenset(
    name for name in (*ARCHITECTURE, *MODEL_OPTIONS) if name.startswith(("moe_", "num_moe_", "hybrid_layer_pattern"))
)
"""Fields in which a model with experts may differ from the dense model from which its experts are made."""


def architecture_differences(
    config: PretrainConfig, described: Mapping[str, Any], leave_out: Container[str] = ()
) -> list[str]:
    """Returns a sentence for each architecture value that differs from another run's description, except the fields in
    `leave_out`. A field that only one of the two uses, because they differ in the flag that it depends on, is left out
    too."""
    ours: Mapping[str, object] = architecture_of(config)
    recorded = described.get("architecture", {})
    # Older descriptions have fields without effect. All leave out options at their defaults.
    known = {name: flag_table()[name].default for name in MODEL_OPTIONS} | dict(described) | recorded
    theirs: Mapping[str, Any] = {name: value for name, value in recorded.items() if _matters(name, known)}
    if not has_heads(config.transformer):
        theirs = {name: value for name, value in theirs.items() if name not in _OF_HEADS}
    if isinstance(theirs.get(_PATTERN), str):
        theirs = {**theirs, _PATTERN: without_stages(theirs[_PATTERN])}
    ours, theirs = in_one_spelling(ours, theirs)
    differing = [name for name in (*ARCHITECTURE, *MODEL_OPTIONS) if theirs and ours.get(name) != theirs.get(name)]
    return [
        f"{_called(name)} is {_shown(name, ours.get(name))} in this run and {_shown(name, theirs.get(name))} in the "
        "checkpoint"
        for name in differing
        if name not in leave_out and not (_goes_with(name, differing) and None in (ours.get(name), theirs.get(name)))
    ]


def names_of_this_run(config: PretrainConfig, described: Mapping[str, Any]) -> Renaming | None:
    """Returns how this run's model names the tensors of a described run's checkpoint; None if both have the same
    names."""
    return renaming(architecture_of(config), described.get("architecture", {}))


COMPARED = (
    *("seed", "bf16", "fp16", "fp64"),
    *("seq_length", "global_batch_size", "rampup_batch_size"),
    *("mock_data", "data_path", "train_data_path", "valid_data_path"),
    *("data_args_path", "data_stages", "per_split_data_args_path", "split"),
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"),
    *("optimizer", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
    *("attention_dropout", "hidden_dropout", "calculate_per_token_loss"),
    *("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "balanced_packing"),
    *("sft", "fim_data", "fim_rate", "fim_spm_rate", "mask_prob", "short_seq_prob"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
)
"""Fields that a resumed run may change. It then computes other numbers than the run before would have computed."""


def setting_differences(
    config: PretrainConfig,
    described: Mapping[str, object],
    fields: Sequence[str] = COMPARED,
    *,
    with_versions: bool = True,
) -> list[str]:
    """Returns a sentence for each of `fields`, and for each version, that differs from another run's description."""
    if "command_line" not in described:
        return []
    ours, theirs = (read_recorded(words).values for words in (command_line_of(config), recorded_words(described)))
    pairs = [(spelling_of(name), ours[name], theirs[name]) for name in fields]
    if with_versions:
        pairs += [(name, describe_run(config)[name], described.get(name)) for name in ("torch", "python")]
    return [
        f"{name} is {_shown_or_unset(now)} in this run and was {_shown_or_unset(before)} when the checkpoint was saved"
        + (": the same id may mean another text now" if name == spelling_of("tokenizer_type") else "")
        for name, now, before in pairs
        if now != before
    ]


def _shown_or_unset(value: object) -> str:
    return "not set" if value is None else value_text(value)


def _goes_with(field: str, others: Container[str | None]) -> bool:
    """Whether a flag that this one depends on, directly or through others, is among `others`."""
    flag = flag_table().get(field)
    conditions = [] if flag is None else [*needs_of(flag), *ways_of(flag)]
    return any(other.flag.field in others or _goes_with(other.flag.field, others) for other in conditions)


def _called(field: str) -> str:
    return _WITHOUT_A_FLAG.get(field, spelling_of(field))


_ACTIVATIONS = f"({', '.join(map(spelling_of, ACTIVATIONS))} or none)"
_WITHOUT_A_FLAG = {
    "activation_func": f"the activation {_ACTIVATIONS}",
    "gated_linear_unit": f"the MLP's gate {_ACTIVATIONS}",
}
"""What several flags say together."""


def _shown(field: str, value: Any) -> str:
    flag = flag_table().get(field)
    if value is None:
        return "not set"
    if flag is not None and flag.switch is not None and not flag.switch[flag.spelling]:  # given, it says no
        return value_text(not value)
    return value_text(value)


def check_trained_parts(config: PretrainConfig, described: Mapping[str, object]) -> None:
    """Raises UserError if this run trains parts of the model that the described run did not train, or the other way
    round, since the optimizer's state is then that of other parameters."""
    if "command_line" not in described or config.transformer.dsa_indexer_n_heads is None:
        return
    theirs = read_recorded(recorded_words(described)).values["dsa_indexer_loss_coeff"]
    ours = config.transformer.dsa_indexer_loss_coeff
    if bool(ours) == bool(theirs):
        return
    trains = f"--dsa-indexer-loss-coeff {ours} trains" if ours else "without --dsa-indexer-loss-coeff a run leaves"
    state = "lacks that of the indexer" if ours else "has that of the indexer"
    raise UserError(
        f"{trains} the indexer of sparse attention{'' if ours else ' as it is'}, and the optimizer's state in the "
        f"checkpoint {state} (the run that saved it had {_shown_or_unset(theirs)}): give the same flag, or "
        "--no-load-optim to continue with a fresh optimizer"
    )


def check_architecture(config: PretrainConfig, described: Mapping[str, object]) -> None:
    """Raises UserError naming every flag that makes this run's model differ from the described one."""
    differences = architecture_differences(config, described)
    if differences:
        raise UserError(
            f"{'; '.join(differences)}: give the same, or --use-checkpoint-args to take the checkpoint's, or "
            "--finetune to change the model on purpose"
        )
