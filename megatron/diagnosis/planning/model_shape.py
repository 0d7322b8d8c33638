"""The sizes of a model for an architecture and a parameter count.

A published model of the architecture is taken as it is if its count, with the vocabulary of the specification, reads
like the asked one (7B may be 6.5 to 7.5 billion). Otherwise the nearest one is scaled: depth and width grow together,
as they do among published models, and the count ends within 0.5% of what was asked.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.declarations.flag_grammars import layer_pattern
from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.parameter_count import ParameterCount, parameter_count
from megatron.diagnosis.planning.published_models import PublishedModel, published_models
from megatron.diagnosis.planning.quantities import Quantity, short

_TOLERANCE = 0.005


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model."""

    flags: Mapping[str, Any]
    """Model flags by field."""
    reasons: Mapping[str, str]
    """For each of the flags, where its value comes from."""
    vocab_size: int
    """Entries of the vocabulary, without padding."""
    parameters: int
    """Parameters of the model."""
    active_parameters: int
    """Parameters that one token uses."""
    basis: PublishedModel
    """The published model that it is or was scaled from."""
    notes: tuple[str, ...] = ()


def shape_of(
    architecture: str | None, params: Quantity, vocab_size: int | None, seq_length: int, objective: str = "causal"
) -> ModelShape:
    """Returns the sizes for an architecture by name, such as "Llama-style decoder-only". Without a vocabulary, that of
    the published model. Raises UserError if no sizes come near the count."""
    family, note = _family(architecture, objective)
    notes = (note,) if note else ()

    def distance(model: PublishedModel) -> tuple[float, int]:
        """Smaller for a better start: a near count, the vocabulary of the specification, and then the latest."""
        off = abs(math.log(model.count(vocab_size, model.positions and seq_length) / params.value))
        return round(off + 0.3 * (vocab_size not in (None, model.vocab_size)), 2), -family.index(model)

    near = [model for model in family if params.allows(model.count(vocab_size, model.positions and seq_length))]
    near = near or [m for m in family if vocab_size in (None, m.vocab_size) and params.allows(_named_size(m.name))]
    if near:
        return _as_published(min(near, key=distance), vocab_size, seq_length, notes)
    scalable = [model for model in family if model.family == "gpt" and "linear_attention_freq" not in model.flags]
    if not scalable:
        sizes = " or ".join(short(model.parameters) for model in family)
        raise UserError(
            f"parameter count {short(params.value)}: {architecture} has published sizes only, as its layers differ; "
            f"nearest: {sizes}"
        )
    basis = min(scalable, key=distance)
    return _scaled(basis, params, vocab_size or basis.vocab_size, seq_length, notes)


# ---------------------------------------------------------------------------------------------------------------------
# Families


def _family(architecture: str | None, objective: str) -> tuple[Sequence[PublishedModel], str | None]:
    """Returns the published models that an architecture's name means, and a note if it names none."""
    plain, wanted = _plain(architecture or ""), ("bert",) if objective == "masked" else ("gpt", "mamba")
    models = [model for model in published_models() if model.family in wanted]
    of_experts = bool(re.search(r"moe|mixture|experts", (architecture or "").lower()))
    for names_of in (_full_names, _generation, _stem):
        lengths = [
            max((len(name) for name in map(_plain, names_of(model.name)) if name and name in plain), default=0)
            for model in models
        ]
        if not any(lengths):
            continue
        named = [model for model, length in zip(models, lengths, strict=True) if length == max(lengths)]
        same_kind = [model for model in named if bool(model.flags.get("num_moe_experts")) is of_experts]
        return (named if names_of is not _stem else same_kind or named), None
    said = f"architecture {architecture!r} names no published family" if architecture else "no architecture is given"
    if objective == "masked":
        return models, f"{said}; planned as BERT"
    if of_experts:
        sparse = [model for model in models if model.flags.get("num_moe_experts") and model.family == "gpt"]
        return sparse, f"{said}; planned as the published mixture of experts whose size is nearest"
    llamas = [m for m in models if _stem(m.name) == ["llama"] and not m.flags.get("num_moe_experts")]
    return llamas, f"{said}; planned as Llama-style"


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


_SIZE = re.compile(r"-(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z]).*$")


def _full_names(name: str) -> list[str]:
    """Returns a model's name with its size and, if more than the family's name is left, without: llama3 of llama3-8b,
    nemotron-h of nemotron-h-8b."""
    left = _SIZE.sub("", name)
    return [name, left] if re.search(r"[\d-]", left) else [name]


def _generation(name: str) -> list[str]:
    """Returns the part of a model's name that several models of a generation share: llama4 of llama4-scout-17b-16e."""
    first = name.partition("-")[0]
    return [first] if re.search(r"\d", first) else []


def _named_size(name: str) -> float:
    """Returns the parameters that a model's name says: 7e9 of qwen2.5-7b, whose count is 7.6e9; 0 if it says none."""
    found = _SIZE.search(name)
    return int(found[1] or 1) * float(found[2]) * {"b": 1e9, "m": 1e6}[found[3]] if found else 0.0


def _stem(name: str) -> list[str]:
    return re.findall(r"^[a-z]+", name) or [name]


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def _as_published(model: PublishedModel, vocab_size: int | None, seq_length: int, notes: tuple[str, ...]) -> ModelShape:
    reasons = dict.fromkeys(model.flags, f"published: {model.name}")
    size, positions = vocab_size or model.vocab_size, model.positions and seq_length
    total, active = model.count(size, positions), model.count(size, positions)
    if model.flags.get("num_moe_experts") and model.family == "gpt":
        active = parameter_count(model.flags, size, positions).active
    return ModelShape(dict(model.flags), reasons, size, total, active, model, notes)


def _scaled(
    basis: PublishedModel, params: Quantity, vocab_size: int, seq_length: int, notes: tuple[str, ...]
) -> ModelShape:
    """Returns the scaled sizes of a model whose ratio of width to depth is nearest to that of `basis`."""
    aspect = basis.flags["hidden_size"] / basis.flags["num_layers"]

    def badness(found: tuple[dict[str, Any], ParameterCount]) -> float:
        flags, count = found
        off = abs(count.total / params.value - 1)
        uneven = 0.4 * (flags["num_attention_heads"] % 8 > 0)
        uneven += 0.15 * (flags["num_layers"] % 2 > 0) + 0.1 * (flags["num_layers"] % 4 > 0)
        wide = abs(math.log(flags["hidden_size"] / flags["num_layers"] / aspect))
        return wide + uneven + 10 * off

    found = list(_candidates(basis, params.value, vocab_size, seq_length))
    if not found:
        least = vocab_size * 128
        raise UserError(
            f"parameter count {short(params.value)}: no {basis.name} of this size has a vocabulary of {vocab_size:,}, "
            f"whose embedding has {short(least)} parameters at width 128; nearest: fewer entries or more parameters"
        )
    flags, count = min(found, key=badness)
    reason = f"scaled from {basis.name}, so that the count is {short(params.value)} within 0.5%"
    kept = f"as {basis.name}"
    reasons = {name: kept if value == basis.flags.get(name) else reason for name, value in flags.items()}
    return ModelShape(flags, reasons, vocab_size, count.total, count.active, basis, notes)


def _candidates(
    basis: PublishedModel, wanted: float, vocab_size: int, seq_length: int
) -> Iterator[tuple[dict[str, Any], ParameterCount]]:
    """Yields sizes whose count is within the tolerance: for each width the depths next to the wanted count, and inner
    widths that make up for the rest."""
    old = basis.flags
    width_of_head = old["hidden_size"] // old["num_attention_heads"]
    dense, period = _dense_first(old), _period(old)
    for h in range(width_of_head, 40 * 1024 + 1, width_of_head):
        if h % 128 and h > 512:  # small models need finer steps than tensor cores like
            continue
        flags = _with_width(old, h, width_of_head)
        positions = seq_length if basis.positions else 0
        one = parameter_count(_with_depth(old, flags, dense + period), vocab_size, positions).total
        two = parameter_count(_with_depth(old, flags, dense + 2 * period), vocab_size, positions).total
        periods = 1 + (wanted - one) / (two - one)
        if not 1 <= dense + periods * period <= 400:
            continue
        for number in range(max(1, math.floor(periods) - 1), math.ceil(periods) + 2):
            layers = dense + number * period
            for scale in _INNER_SCALES:
                sized = _with_depth(old, _with_inner(flags, scale), layers)
                count = parameter_count(sized, vocab_size, positions)
                if abs(count.total / wanted - 1) <= _TOLERANCE:
                    yield sized, count
                    break


_INNER_SCALES = (1.0, *(1 + sign * part / 64 for part in range(1, 17) for sign in (1, -1)))


def _with_width(old: Mapping[str, Any], h: int, width_of_head: int) -> dict[str, Any]:
    flags = {name: value for name, value in old.items() if not name.startswith("rope_scaling")}
    heads = max(1, h // width_of_head)
    flags |= {"hidden_size": h, "num_attention_heads": heads}
    if "num_query_groups" in old:
        groups = old["num_query_groups"]
        flags["num_query_groups"] = next(n for n in range(min(groups, heads), 0, -1) if heads % n == 0)
    ratio = h / old["hidden_size"]
    for name in ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if old.get(name):
            flags[name] = _rounded(old[name] * ratio, h)
    return flags


def _with_inner(flags: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Returns flags with a scaled inner width of the layers that hold most parameters."""
    name = "moe_ffn_hidden_size" if flags.get("moe_ffn_hidden_size") else "ffn_hidden_size"
    inner = flags.get(name) or 4 * flags["hidden_size"]
    if scale == 1.0:
        return dict(flags)
    return {**flags, name: _rounded(inner * scale, flags["hidden_size"])}


def _rounded(inner: float, h: int) -> int:
    """Returns an inner width that tensor cores and tensor parallelism divide well; finer for small models."""
    step = 128 if h >= 1024 else 16
    return max(step, round(inner / step) * step)


def _dense_first(old: Mapping[str, Any]) -> int:
    """Returns the number of dense layers before those with experts, of a model that has both."""
    kinds = _kinds(old, "moe_layer_freq")
    dense = kinds.index(1) if 1 in kinds else 0
    return dense if all(kinds[dense:]) else 0


def _period(old: Mapping[str, Any]) -> int:
    """Returns the number of layers after which dense layers and layers with experts repeat; 1 for any other model."""
    kinds = _kinds(old, "moe_layer_freq")
    if _dense_first(old) or not kinds:
        return 1
    return next(n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))


_parsed = functools.cache(layer_pattern)


def _kinds(old: Mapping[str, Any], name: str) -> list[int]:
    """Returns the kind of each layer, if a flag says it layer by layer; otherwise an empty list."""
    value = old.get(name)
    kinds = _parsed(value) if isinstance(value, str) else value
    return kinds if isinstance(kinds, list) else []


def _with_depth(old: Mapping[str, Any], flags: Mapping[str, Any], layers: int) -> dict[str, Any]:
    dense = _dense_first(old)
    sized = {**flags, "num_layers": layers}
    for name in ("no_rope_freq", "window_attn_skip_freq", "attention_chunk_skip_freq", "moe_layer_freq"):
        if kinds := _kinds(old, name):
            sized[name] = "[" + ",".join(str(kinds[layer % len(kinds)]) for layer in range(layers)) + "]"
    return sized | ({"moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})"} if dense else {})
