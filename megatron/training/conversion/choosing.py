"""Which architecture says all that makes a model what it is: its config.json, read back, gives the same model."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import has_experts, is_windowed
from megatron.training.config.flag_table import flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.conversion.families import FAMILIES, Family, family_of
from megatron.training.conversion.rope import as_scaled_in
from megatron.training.inspection.run_description import architecture_differences, words_of
from megatron.training.trained_model import config_for_one_process

_PATTERNS = {"window_attn_skip_freq": is_windowed, "moe_layer_freq": has_experts}
"""Fields that say in which layers something holds: by a period, or by a list."""

_IN_NONE = {
    "multi_latent_attention": "latent attention (--multi-latent-attention)",
    "mtp_num_layers": "layers that predict further tokens (--mtp-num-layers)",
}
"""Fields without a word in any config.json: with one, a list of whatever else differs would only hide it."""


def choose_family(config: PretrainConfig, described: Mapping[str, Any], architecture: str | None) -> Family:
    """The named family, or the first that can say the model. Raises UserError naming the flags in the way."""
    values = config.flat()
    foreign = [what for field, what in _IN_NONE.items() if values[field]]
    if foreign:
        known = ", ".join(family.architecture for family in FAMILIES)
        raise UserError(f"none of the architectures that can be exported has {' or '.join(foreign)}: {known}")
    if architecture is not None:
        candidates = [family_of(architecture)]
    else:
        candidates = [family for family in FAMILIES if family.has_experts == (values["num_moe_experts"] is not None)]
    in_the_way = [_unsaid(family, values, described) for family in candidates]
    for family, sentences in zip(candidates, in_the_way, strict=True):
        if not sentences:
            return family
    nearest = min(range(len(candidates)), key=lambda index: len(in_the_way[index]))
    name, sentences = candidates[nearest].architecture, in_the_way[nearest]
    comes = "is asked for" if architecture is not None else "comes nearest to this model"
    raise UserError(f"{name} {comes}, but: {'; '.join(sentences)}")


def _unsaid(family: Family, values: dict[str, Any], described: Mapping[str, Any]) -> list[str]:
    """What is lost when the family's config.json is read back: a sentence for each flag."""
    try:
        read_back = _as_spelled_in(values, family.values(family.config(values)))
    except UserError as error:
        return [str(error)]
    words = [word for name, value in read_back.items() for word in words_of(flag_table()[name], value)]
    needed = ["--micro-batch-size", "1", "--seq-length", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1"]
    again = config_for_one_process({"command_line": [*needed, *words]}, [], has_cuda=False)
    return [
        sentence.replace("in this run", f"for {family.architecture}")
        for sentence in architecture_differences(again, described)
    ]


def _as_spelled_in(values: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with the spelling that a run chose where two say one thing."""
    fields = as_scaled_in(values, fields)
    if values["group_query_attention"]:
        fields = {"group_query_attention": True, "num_query_groups": values["num_query_groups"]} | fields
    for field, holds in _PATTERNS.items():
        layers = range(1, values["num_layers"] + 1)
        read_back, of_run = (SimpleNamespace(**each) for each in (values | fields, values))
        if field in fields and all(holds(read_back, layer) == holds(of_run, layer) for layer in layers):
            fields[field] = values[field]
    return fields
