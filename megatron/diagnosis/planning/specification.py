"""The specification of a run: what was asked for, as values, and where each was said."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.quantities import Quantity, length, percentage, quantity, switch, whole_number
from megatron.diagnosis.planning.specification_text import KEY_OF_FIELD, Answer, Answers

DERIVED = re.compile(
    r"(?:to be |please )?(derive|auto\b|automatic|choose|chosen|remain|rest\b|whatever|you decide|any\b|best|optimal"
    r"|as needed|compute|not specified|unspecified|default|same as|from the|as the tokenizer)",
    re.IGNORECASE,
)
"""Beginning of a value that leaves the choice to the planner."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer by name or path."""

    name: str
    """Its name in the specification, without the size."""
    vocab_size: int | None
    """Number of its ids; None: not said."""


@dataclass(frozen=True)
class Source:
    """A source of training data."""

    name: str
    ratio: float
    """Share of the tokens, from 0 to 1."""


@dataclass(frozen=True)
class Packing:
    """How documents share a row."""

    apart: bool
    """Whether they do not see each other."""
    dynamic: bool = False
    """Whether each is split over as few ranks as have room for it (dynamic context parallelism)."""


@dataclass(frozen=True)
class LossCheck:
    """What the loss must do."""

    text: str
    step: int | None
    most: float | None
    """Largest loss at that step."""


@dataclass(frozen=True, kw_only=True)
class Specification:
    """What a plan is made for. None: not specified, or left to the planner."""

    architecture: str | None = None
    params: Quantity | None = None
    vocab_size: int | None = None
    seq_length: int | None = None
    objective: str | None = None
    """causal or masked."""
    framework: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpu: str | None = None
    """Type and memory as they were written."""
    interconnect: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None
    expert_parallel: int | None = None
    data_parallel: int | None = None
    zero_stage: int | None = None
    packing: Packing | None = None
    tokenizer: Tokenizer | None = None
    deduplication: str | None = None
    """exact-match, minhash, both or none."""
    data_mix: tuple[Source, ...] | None = None
    tokens: int | None = None
    throughput: float | None = None
    """Tokens per second and GPU."""
    checkpoint_interval: int | None = None
    """Steps."""
    memory_utilization: float | None = None
    """Largest part of a GPU's memory that may be used, from 0 to 1."""
    loss_check: LossCheck | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    """File and line, or flag, of each value, by field."""

    def cite(self, field_name: str) -> str:
        """Returns a comment that names the line of the specification which sets a value."""
        return f"specification, {KEY_OF_FIELD[field_name].name} ({self.where[field_name]})"

    @property
    def is_dynamic(self) -> bool:
        """Whether context parallelism is dynamic."""
        return self.packing is not None and self.packing.dynamic

    def is_given(self, field_name: str) -> bool:
        """Whether the specification sets the value."""
        return getattr(self, field_name) is not None


def read_specification(answers: Answers) -> Specification:
    """Makes values of the answers. Raises UserError with all answers that cannot be read, one a line."""
    values: dict[str, Any] = {}
    problems = []
    for name, answer in answers.of_field.items():
        reader = _READERS[name]
        try:
            values[name] = None if reader is not _text and DERIVED.match(answer.text) else reader(answer.text)
        except ValueError as error:
            problems.append(f"{_named(name, answer)} {answer.text}: {error}")
    if problems:
        raise UserError("\n".join(problems))
    where = {name: answers.of_field[name].where for name, value in values.items() if value is not None}
    return Specification(**values, where=where)


def _named(name: str, answer: Answer) -> str:
    return answer.where if answer.where.startswith("--") else f"{answer.where}: {KEY_OF_FIELD[name].name}"


# ---------------------------------------------------------------------------------------------------------------------
# Values


def _text(text: str) -> str:
    return text


def _stage(text: str) -> int:
    found = re.search(r"\d+", text)
    if found is None or int(found[0]) > 3:
        raise ValueError("expected 1, 2 or 3 (0: no sharding)")
    return int(found[0])


def _objective(text: str) -> str:
    if re.search(r"mask|mlm|bert", text, re.IGNORECASE):
        return "masked"
    if re.search(r"caus|autoregress|next|clm|\blm\b|language", text, re.IGNORECASE):
        return "causal"
    raise ValueError("expected causal LM or masked LM")


def _tokenizer(text: str) -> Tokenizer:
    """Reads a name and, behind it, a size: "Llama 3 (128,256)", "GPT-2 BPE, vocabulary size 50257"."""
    size = re.search(
        r"[\s,;(:/-]+(?:with\s+)?(?:an?\s+)?(?:vocab\w*\s*(?:size)?\s*(?:of\s*|[=:]\s*)?)?"
        r"(\d{1,3}(?:,\d{3})+|\d{4,}|\d+(?:\.\d+)?\s*[kK]|(?<=\()\d+)(?:[\s-]*(?:vocab\w*|tokens?|ids|entries|size))*\)?\.?\s*$",
        text,
    )
    if size is None:
        return Tokenizer(text, None)
    name = text[: size.start()].strip(" ,;(:-")
    if not name:
        raise ValueError("expected a name or path before the size of the vocabulary")
    return Tokenizer(name, quantity(size[1]).whole)


def _deduplication(text: str) -> str:
    exact = re.search(r"exact|hash(?!.*minhash)|sha|md5", re.sub("minhash", "", text, flags=re.I), re.IGNORECASE)
    fuzzy = re.search(r"min-?hash|fuzzy|near|lsh", text, re.IGNORECASE)
    if re.search(r"\bboth\b", text, re.IGNORECASE) or (exact and fuzzy):
        return "both"
    if exact or fuzzy:
        return "exact-match" if exact else "minhash"
    if re.match(r"no(ne|t|\b)|without|false|skip", text, re.IGNORECASE):
        return "none"
    raise ValueError("expected exact-match, MinHash, both or none")


_RATIO = r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)"


def _data_mix(text: str) -> tuple[Source, ...]:
    """Reads names with ratios in either order: "70% web, 30% code", "web: 0.7, code: 0.3", "web 7 / code 3"."""
    found: list[tuple[str, float, bool]] = []
    apart = re.fullmatch(r"([\d./\s]+?)\s+([A-Za-z].*/.*)", text)  # 70/20/10 web/code/books
    if apart and apart[1].count("/") == apart[2].count("/"):
        text = ", ".join(
            f"{number} {name}" for number, name in zip(*(x.split("/") for x in apart.groups()), strict=True)
        )
    for part in re.split(r"[,;+/|]|\band\b|\n", text):
        if part.strip(" ."):
            found.append(_source(part.strip(" ."), text))
    names = [name for name, _, _ in found]
    if len(set(names)) < len(names):
        raise ValueError("a source is named twice; give each once")
    total = sum(number for _, number, _ in found)
    of_hundred = any(percent for _, _, percent in found) or total > 1.5
    whole = 100.0 if of_hundred else 1.0
    if not found or total <= 0 or min(number for _, number, _ in found) <= 0:
        raise ValueError("expected ratios above 0")
    if abs(total - whole) > 0.005 * whole:
        shares = ", ".join(f"{name} {100 * number / total:.4g}%" for name, number, _ in found)
        raise ValueError(f"the ratios add up to {total:g}, not {whole:g}; nearest: {shares}")
    return tuple(Source(name, round(number / total, 9)) for name, number, _ in found)


def _source(part: str, whole: str) -> tuple[str, float, bool]:
    """Returns name, number and whether a % follows, of a part of a data mix."""
    before = re.fullmatch(rf"{_RATIO}\s*(?:of\s+)?([A-Za-z].*)", part)
    behind = re.fullmatch(rf"(.*?[A-Za-z].*?)[\s:=(-]+{_RATIO}\s*\)?", part)
    if before:
        return before[3].strip(" :=-()"), float(before[1]), bool(before[2])
    if behind:
        return behind[1].strip(" :=-()"), float(behind[2]), bool(behind[3])
    if re.fullmatch(r"[A-Za-z][\w .()-]*", part) and not re.search(r"[,;+/|\n]", whole):
        return part, 1.0, False  # a single source
    raise ValueError(f"{part!r} is no source with its ratio; expected such as 70% web, 20% code, 10% books")


def _throughput(text: str) -> float:
    value = quantity(text).value
    if re.search(r"per\s*day|/\s*day|tflop|mfu|%", text, re.IGNORECASE):
        raise ValueError("expected tokens per second and GPU, such as 10,000 tokens/s/GPU")
    return value


def _packing(text: str) -> Packing:
    """Reads yes or no, and whether context parallelism is dynamic: "yes, dynamic context parallelism"."""
    apart = switch(text)
    denied = re.search(r"\b(?:no|not|without) (?:dynamic|hybrid)", text, re.IGNORECASE)
    dynamic = re.search(r"dynamic|hybrid context", text, re.IGNORECASE) is not None and not denied
    if dynamic and not apart:
        raise ValueError("dynamic context parallelism needs packed documents: write yes, dynamic context parallelism")
    return Packing(apart, dynamic)


_STEP = re.compile(
    r"\b(?:steps?|iterations?|iters?)\W{0,3}(\d[\d,]*k?)|\b(\d[\d,]*k?)[ -]*(?:steps?|iter)", re.IGNORECASE
)
_LOSS = re.compile(
    r"(?:below|under|than|most|loss|to|of|[<≤~=:]|about)\s*(\d+(?:\.\d+)?)(?![\w.]*[\w%]| spike)"
    r"|(?<![\w.])(\d+\.\d+)(?![\w.%])",
    re.IGNORECASE,
)


def _loss_check(text: str) -> LossCheck:
    """Reads a step and a loss in either order: "below 3.2 at step 1000", "step 500: loss 2.9", "falls in 1k steps"."""
    found = _STEP.search(text)
    step = quantity(found[1] or found[2]).whole if found else None
    rest = f"{text[: found.start()]} {text[found.end() :]}" if found else text
    losses = [float(loss[1] or loss[2]) for loss in _LOSS.finditer(rest)]
    if step == 0 or any(not 0 < loss < 100 for loss in losses):
        raise ValueError("expected a loss and a step, such as below 3.2 at step 1000")
    return LossCheck(text, step, max(losses, default=None))


_READERS: dict[str, Callable[[str], object]] = {
    "architecture": _text,
    "params": quantity,
    "vocab_size": whole_number,
    "seq_length": length,
    "objective": _objective,
    "framework": _text,
    "gpus": whole_number,
    "gpus_per_node": whole_number,
    "gpu": _text,
    "interconnect": _text,
    **dict.fromkeys(
        ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "data_parallel"), whole_number
    ),
    "zero_stage": _stage,
    "packing": _packing,
    "tokenizer": _tokenizer,
    "deduplication": _deduplication,
    "data_mix": _data_mix,
    "tokens": whole_number,
    "throughput": _throughput,
    "checkpoint_interval": whole_number,
    "memory_utilization": percentage,
    "loss_check": _loss_check,
}
assert set(_READERS) == {item.name for item in fields(Specification)} - {"where"}
