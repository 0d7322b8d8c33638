"""The ways in which context parallel ranks exchange keys and values: a config's `cp_comm_type`, one word for all layers
or one per layer."""

import enum
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.exceptions import UserError
from megatron.core.groups.rank_grid import divisors

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class CommType(enum.Enum):
    """How queries get the keys of other ranks."""

    p2p = "p2p"
    """Ring attention: keys and values go from rank to rank, one step ahead of the computation."""
    a2a = "a2a"
    """Each rank gets some heads of whole rows (all-to-all)."""
    a2a_p2p = "a2a+p2p"
    """a2a inside groups of ranks and p2p between them; `hierarchical_context_parallel_sizes` gives both sizes."""


_GATHERED = ("all_gather", "allgather")
"""Megatron-LM's words for gathering all keys before attention. The ring fetches the same keys and sends no more; it was
5% of a step faster (docs/benchmarks.md, ways to communicate)."""
_WORDS = {comm_type.value: comm_type for comm_type in CommType} | dict.fromkeys(_GATHERED, CommType.p2p)


def comm_type_of(config: "TransformerConfig", layer_number: int, word: str | None = None) -> CommType:
    """Returns the communication type of a layer (counted from 1 over the whole model): `word`, else the config's, else
    p2p.

    Raises UserError for the problems of `comm_type_problems`.
    """
    words = word or config.cp_comm_type or CommType.p2p.value
    if isinstance(words, list):
        words = words[0] if len(words) == 1 else words[layer_number - 1]
    if words not in _WORDS:
        raise UserError(f"cp_comm_type {words}: choose among {', '.join(kind.value for kind in CommType)}")
    return _WORDS[words]


def asks_to_gather(words: str | list[str] | None) -> bool:
    """Whether a config's `cp_comm_type` names all_gather, for which the ring computes."""
    return bool({words} & {*_GATHERED} if isinstance(words, str) else {*(words or ())} & {*_GATHERED})


def comm_type_problems(config: "TransformerConfig", has_heads: bool = True) -> Iterator[str]:
    """Yields a sentence for each invalid value; `config` has the fields of TransformerConfig. `has_heads` is False for
    a model without attention."""
    size, sizes = config.context_parallel_size, config.hierarchical_context_parallel_sizes
    words = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type or "p2p"]
    unknown = [word for word in words if word not in _WORDS]
    if unknown:
        yield f"{{cp_comm_type}}: choose among {', '.join(kind.value for kind in CommType)}"
    if len(words) not in (1, config.num_layers) and config.num_layers:
        yield f"{{cp_comm_type}} has {len(words)} words; 1 or {config.num_layers} ({{num_layers:name}}) work"
    if size <= 1 or unknown:
        return
    kinds = {_WORDS[word] for word in words}
    if sizes and math.prod(sizes) != size:
        product = math.prod(sizes)
        yield f"{{hierarchical_context_parallel_sizes}} multiply to {product}, not to {{context_parallel_size}}"
    elif CommType.a2a_p2p in kinds and len(sizes or []) != 2:
        halves = [factor for factor in divisors(size) if 1 < factor < size] or [size]
        near = min(halves, key=lambda factor: abs(factor * factor - size))
        yield (
            "{cp_comm_type:name} a2a+p2p needs two {hierarchical_context_parallel_sizes:name}, of a2a and of p2p; "
            f"use {near} {size // near}"
        )
    if has_heads:
        yield from _head_problems(config, kinds)


_NOT_REGROUPED = {
    "num_moe_experts": "experts exchange the tokens of ranks that compute micro-batches of other lengths",
    "hybrid_layer_pattern": "recurrent layers pass states along the ranks of the model's context parallel group",
    "experimental_attention_variant": "its layers communicate over the model's context parallel group",
    "fp8": "its scales are those of a whole micro-batch, and the documents of a micro-batch depend on the ranks",
    "fp4": "its scales are those of a whole micro-batch, and the documents of a micro-batch depend on the ranks",
}


def regrouping_problems(config: "TransformerConfig") -> Iterator[str]:
    """Yields a sentence for each value that dynamic context parallelism does not go with."""
    if not config.hybrid_context_parallel:
        return
    words = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    if any(_WORDS.get(word or "p2p") is not CommType.p2p for word in words):
        yield "{hybrid_context_parallel:name} exchanges keys with p2p only, not with {cp_comm_type}; use p2p"
    for field, why in _NOT_REGROUPED.items():
        if getattr(config, field, None) is not None:
            yield f"{{hybrid_context_parallel:name}} does not go with {{{field}}}: {why}; leave one out"


def _head_problems(config: "TransformerConfig", kinds: set[CommType]) -> Iterator[str]:
    """Yields a sentence for each number of heads that a2a cannot split over its ranks."""
    size, sizes = config.context_parallel_size, config.hierarchical_context_parallel_sizes
    if not config.num_attention_heads or config.tensor_model_parallel_size < 1:
        return
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    for kind, sharing in ((CommType.a2a, size), (CommType.a2a_p2p, sizes[0] if sizes else 1)):
        if kind in kinds and heads % max(1, sharing):
            near = max(factor for factor in divisors(math.gcd(heads, size)) if factor < sharing)
            yield (
                f"{{cp_comm_type:name}} {kind.value} shares the {heads} heads of a tensor parallel rank among "
                f"{sharing} context parallel ranks, which do not divide them; use {near}, or "
                "{cp_comm_type:name} p2p"
            )
