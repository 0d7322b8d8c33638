"""The settings of a planned run: every flag with the reason for its value."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.diagnosis.planning.layouts import Layout
from megatron.diagnosis.planning.model_shape import ModelShape
from megatron.diagnosis.planning.specification import Source, Specification
from megatron.diagnosis.planning.training_values import TrainingValues
from megatron.training.config.flag_table import flag_table

_OPTIMIZER = "as Llama 2 (arXiv:2307.09288, section 2.2) and GPT-3 (arXiv:2005.14165, appendix B)"


@dataclass(frozen=True)
class Setting:
    """A flag of the run."""

    field: str
    value: Any
    reason: str
    """Names a constraint, a measurement or a line of the specification."""


def model_settings(shape: ModelShape, specification: Specification) -> Iterator[Setting]:
    """Yields the sizes of the model and of its samples."""
    for field, value in shape.flags.items():
        if value is not None:
            yield Setting(field, value, shape.reasons[field])
    cited = specification.cite("seq_length")
    yield Setting("seq_length", specification.seq_length, cited)
    yield Setting("max_position_embeddings", specification.seq_length, f"the longest row; {cited}")


def training_settings(values: TrainingValues, shape: ModelShape) -> Iterator[Setting]:
    """Yields batch size, schedule and optimizer."""
    published = shape.basis.training
    yield Setting("global_batch_size", values.global_batch_size, values.batch_reason)
    yield Setting("train_iters", values.train_iters, values.iters_reason)
    yield Setting("lr", values.lr, values.lr_reason)
    yield Setting("min_lr", values.min_lr, "a tenth of lr (Hoffmann et al. 2022, arXiv:2203.15556, appendix B)")
    yield Setting("lr_decay_style", "cosine", "decays over exactly the run (arXiv:2203.15556, section 3.1)")
    yield Setting("lr_warmup_iters", values.warmup_iters, values.warmup_reason)
    for field, usual in (("adam_beta1", 0.9), ("adam_beta2", 0.95), ("weight_decay", 0.1), ("clip_grad", 1.0)):
        own = published.get(field, usual)
        yield Setting(field, own, _OPTIMIZER if own == usual else f"published: {shape.basis.name}")
    yield Setting("bf16", True, "half the memory of float32 and tensor cores, with its range (arXiv:1905.12322)")


def layout_settings(layout: Layout, reasons: Mapping[str, str]) -> Iterator[Setting]:
    """Yields the layout. `reasons` has the reason of each field, and under "" that of all others."""
    for field, value in layout.flags().items():
        yield Setting(field, value, reasons.get(field, reasons[""]))


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and data


def tokenizer_settings(specification: Specification, vocab_size: int) -> Iterator[Setting]:
    """Yields the tokenizer. A name that is no path becomes a path under tokenizer/, where its files have to be put."""
    assert specification.tokenizer is not None
    cited = specification.cite("tokenizer")
    for field, value in tokenizer_flags(specification.tokenizer.name, vocab_size).items():
        yield Setting(field, value, cited if field == "tokenizer_type" else f"put its files here; {cited}")
    if "Null" not in tokenizer_type(specification.tokenizer.name):
        size = specification.cite("vocab_size") if specification.vocab_size else f"its number of ids; {cited}"
        yield Setting("vocab_size", vocab_size, f"a tokenizer with more ids is refused; {size}")


def tokenizer_type(name: str) -> str:
    """Returns the --tokenizer-type for a tokenizer by name or path."""
    return str(tokenizer_flags(name, 1)["tokenizer_type"])


def tokenizer_flags(name: str, vocab_size: int) -> dict[str, Any]:
    """Returns the fields of a tokenizer's config for its name or path; those of files may not exist."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    path = name if Path(name).exists() or re.fullmatch(r"\S*(?:\.json|\.model|\.txt)|\.{0,2}/\S+", name) else None
    if "nulltokenizer" in plain:
        return {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size - 1}
    if (path and path.endswith(".txt")) or "wordpiece" in plain or plain.startswith("bert"):
        return {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": path or "tokenizer/vocab.txt"}
    if path and path.endswith(".model"):
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": path}
    if path:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": path}
    if plain.startswith("gpt2"):
        files = {"vocab_file": "tokenizer/vocab.json", "merge_file": "tokenizer/merges.txt"}
        return {"tokenizer_type": "GPT2BPETokenizer", **files}
    if plain.startswith(("llama2", "llama1")):
        return {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "tokenizer/tokenizer.model"}
    if "sentencepiece" in plain:
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "tokenizer/tokenizer.model"}
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "tokenizer"}


@dataclass(frozen=True)
class PlannedSource:
    """A source of data, and where its tokens will be."""

    name: str
    ratio: float
    prefix: str


def planned_sources(specification: Specification) -> tuple[PlannedSource, ...]:
    """Returns the sources of the data mix with the prefixes of their data sets; one source without a mix."""
    mix = specification.data_mix or (Source("corpus", 1.0),)
    level = "sentence" if specification.objective == "masked" else "document"
    found, seen = [], set()
    for source in mix:
        stem = re.sub(r"[^a-z0-9]+", "-", source.name.lower()).strip("-") or "source"
        while stem in seen:
            stem += "-2"
        seen.add(stem)
        found.append(PlannedSource(source.name, source.ratio, f"data/{stem}_text_{level}"))
    return tuple(found)


EVAL_ITERS = 10
"""Batches of an evaluation."""


def data_settings(
    specification: Specification, sources: Iterable[PlannedSource], global_batch_size: int, layout: Layout
) -> Iterator[Setting]:
    """Yields the blend, the share of validation data and how documents are packed."""
    listed = list(sources)
    cited = specification.cite("data_mix") if specification.data_mix else "no data mix is specified: one source"
    words = [f"{source.ratio:.6g}" if part == 0 else source.prefix for source in listed for part in (0, 1)]
    yield Setting("data_path", words if len(listed) > 1 else [listed[0].prefix], cited)
    assert specification.tokens is not None and specification.seq_length is not None
    validated = EVAL_ITERS * global_batch_size * specification.seq_length
    share = min(100, max(1, -(-2000 * validated // specification.tokens)))  # thousandths: twice what is read, up to 10%
    reason = f"validation data for the gate on the loss: {EVAL_ITERS} batches of it, or more"
    yield Setting("split", f"{1000 - share},{share},0", reason)
    if specification.packing and specification.packing.apart and specification.objective != "masked":
        packing = specification.cite("packing")
        yield Setting("reset_attention_mask", True, f"packed documents do not see each other; {packing}")
        yield Setting("reset_position_ids", True, f"each packed document begins at position 0; {packing}")
        if specification.is_dynamic:
            yield Setting("hybrid_context_parallel", True, f"as few ranks a document as have room for it; {packing}")
            yield Setting("calculate_per_token_loss", True, "micro-batches have different numbers of tokens")
            chunks = math.lcm(2, layout.tensor)
            room = -(-layout.micro_batch * specification.seq_length // (layout.context * chunks)) * chunks
            yield Setting("max_seqlen_per_dp_cp_rank", room, "as many tokens as static rows have on a rank")


# ---------------------------------------------------------------------------------------------------------------------
# Words


def words_of(settings: Iterable[Setting]) -> list[str]:
    """Returns the settings as words of a command line."""
    table, words = flag_table(), []
    for setting in settings:
        flag = table[setting.field]
        if flag.switch is not None:
            words += [spelling for spelling, sets in flag.switch.items() if sets is bool(setting.value)][:1]
        else:
            values = setting.value if isinstance(setting.value, list | tuple) else [setting.value]
            words += [flag.spelling, *map(str, values)]
    return words
