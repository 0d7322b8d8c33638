"""The flags of a run of Megatron-LM from the arguments in its checkpoint."""

from collections.abc import Mapping
from typing import Any

from megatron.conversion.megatron_lm.inert_pickle import Inert
from megatron.core.transformer.config.heterogeneous import HETEROGENEOUS
from megatron.training.config.conditions import is_inert, is_to_come, lacking
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.resolution import field_of_name
from megatron.training.inspection.run_description import words_of

_GROUPS = (
    "model",
    "attention",
    "positions",
    "mixture of experts",
    "multi-latent attention",
    "token mixers",
    "tokenizer",
    "optimizer",
    "learning rate and weight decay",
)
_FIELDS = (
    *("seq_length", "decoder_seq_length"),
    *("micro_batch_size", "global_batch_size", "rampup_batch_size", "train_iters", "train_samples"),
    *("seed", "split", "bf16", "fp16", "init_method_std"),
    *("use_mup", "mup_base_hidden_size", "mup_embedding_mult"),
    *("mup_output_mult", "mup_base_head_dim", "mup_attn_scale_power"),
    *("calculate_per_token_loss", "eod_mask_loss", "reset_position_ids", "reset_attention_mask"),
    *("fim_data", "fim_rate", "fim_spm_rate", "mask_prob", "short_seq_prob"),
)
_LEFT = frozenset(
    "attention_backend cp_comm_type moe_token_dispatcher_type moe_grouped_gemm padded_vocab_size spec"  # noqa: SIM905
    " optimizer_offload_fraction use_precision_aware_optimizer".split()
)
"""Fields of these groups that say how a run computes, not what."""
_RENAMED = {"hybrid_override_pattern": "hybrid_layer_pattern"}
"""Names in the arguments of older releases."""


def flags_of_arguments(arguments: object) -> list[str]:
    """Returns words of a command line for the model, tokenizer, batch, length, schedule and seed of these arguments.

    `arguments` is the namespace of a checkpoint as an inert record, or None, which gives no words. Values at the
    defaults, and flags that another value makes ineffective, are left out.
    """
    given = attributes(arguments)
    values: dict[str, Any] = {}
    for name, value in given.items():
        field = field_of_name(_RENAMED.get(name, name))
        if field is not None and (field == name or field not in values) and _is_plain(value):
            values[field] = value
    _count_newer_null_tokenizer(values)
    text, path = HETEROGENEOUS
    if values.get(text) is not None:
        values.pop(path, None)  # the file that the text was read from
    table = flag_table()
    words: list[str] = []
    for field, value in values.items():
        flag = table[field]
        wanted = (flag.group in _GROUPS and field not in _LEFT) or field in _FIELDS
        if wanted and value is not None and value != flag.default and _is_read(flag, values):
            words += words_of(flag, value)
    return words


def _count_newer_null_tokenizer(values: dict[str, object]) -> None:
    """Lowers `vocab_size` by one if the run's NullTokenizer had no separate id for the end of a document. Our
    NullTokenizer has `--vocab-size` ids and one more for it. That of recent releases (seen in 0.19) has no additional
    id, so their padded vocabulary may be too small for ours."""
    size, padded = values.get("vocab_size"), values.get("padded_vocab_size")
    if values.get("tokenizer_type") == "NullTokenizer" and isinstance(size, int) and size == padded:
        values["vocab_size"] = size - 1


def attributes(arguments: object) -> Mapping[str, object]:
    """Returns the attributes of a namespace in a checkpoint; none if there is no namespace."""
    if isinstance(arguments, Inert) and isinstance(arguments.state, dict):
        return {name: value for name, value in arguments.state.items() if isinstance(name, str)}
    return arguments if isinstance(arguments, dict) else {}


def _is_plain(value: object, depth: int = 2) -> bool:
    """Whether a value consists of numbers and texts. Lists are nested `depth` deep at most: shared ones can take
    exponential time."""
    if isinstance(value, list | tuple):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _is_read(flag: Flag, values: Mapping[str, object]) -> bool:
    """Whether the flag has an effect beside these values."""
    if is_inert(flag) or is_to_come(flag):
        return False
    table = flag_table()
    return lacking(flag, lambda name: values.get(name, table[name].default)) is None
