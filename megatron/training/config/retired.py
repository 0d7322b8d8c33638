"""Flags of other names, most of older Megatron-LM releases, and the flags that replace them."""

from dataclasses import dataclass

from megatron.training.config.unsupported_flags import TABLES, reasons


@dataclass(frozen=True)
class Occurrence:
    """A flag on the command line, with the words that follow it."""

    spelling: str
    words: tuple[str, ...] = ()

    def as_words(self) -> list[str]:
        """Returns the words of a command line that give the flag."""
        if self.words and is_flag(self.words[0]):
            return [f"{self.spelling}={self.words[0]}", *self.words[1:]]
        return [self.spelling, *self.words]


def is_flag(word: str) -> bool:
    """Whether a word of a command line begins a flag. A value of this kind needs `--flag=word`."""
    return (word.startswith("--") and len(word) > 2) or word == "-h"


@dataclass(frozen=True)
class Translation:
    """The flags that replace a retired flag."""

    occurrences: tuple[Occurrence, ...]
    """Flags with the same meaning."""
    implied: tuple[Occurrence, ...]
    """Flags that it also sets unless the command line gives them."""
    warning: str
    """Line that tells the user."""


def translate_all(occurrences: list[Occurrence]) -> tuple[list[Occurrence], list[str]]:
    """Returns the command line with retired flags replaced, and a warning for each of them.

    Implied flags come first, so that a later flag on the command line overrides them.
    """
    implied: list[Occurrence] = []
    current: list[Occurrence] = []
    warnings: dict[str, None] = {}
    for occurrence in occurrences:
        translation = translate(occurrence)
        if translation is None:
            current.append(occurrence)
        else:
            implied += translation.implied
            current += translation.occurrences
            warnings[translation.warning] = None
    if any(occurrence.spelling == _POSITIONS for occurrence in current) and _NO_POSITIONS.warning in warnings:
        warnings = {_SAID_ELSEWHERE if line == _NO_POSITIONS.warning else line: None for line in warnings}
    return implied + current, list(warnings)


def translate(occurrence: Occurrence) -> Translation | None:
    """Returns the flags that replace a retired flag; None if the flag is not retired."""
    spelling, words = occurrence.spelling, occurrence.words
    if spelling in _FULL_RECOMPUTATION:
        method = Occurrence("--recompute-method", words or ("uniform",))
        return _becomes(occurrence, (_FULL, method), implied=(Occurrence("--recompute-num-layers", ("1",)),))
    if spelling == "--no-position-embedding":  # with --use-rotary-position-embeddings it means: no learned positions
        return _NO_POSITIONS
    if spelling == _GPT_OSS:
        return _becomes(occurrence, (), implied=_GPT_OSS_POSITIONS)
    if spelling == _QK_DECAY:
        return _becomes(occurrence, (Occurrence("--apply-wd-to-qk-layernorm", words if words != _QK_WORDS else ()),))
    if spelling == _DEEPSPEED and words:
        return _becomes(occurrence, (Occurrence("--deepspeed-config", words),))
    if spelling in _RENAMED:
        return _becomes(occurrence, (Occurrence(_RENAMED[spelling], words),))
    if spelling in _NOW:
        return _becomes(occurrence, (_NOW[spelling],))
    if spelling in _GONE:
        return Translation((), (), f"{text_of(occurrence)}: retired and ignored: {_GONE[spelling]}")
    return None


def _becomes(old: Occurrence, new: tuple[Occurrence, ...], implied: tuple[Occurrence, ...] = ()) -> Translation:
    why = "another name" if old.spelling in (*_OF_TODAY, _GPT_OSS) else "retired"
    return Translation(new, implied, f"{text_of(old)}: {why}; read as {' '.join(map(text_of, (*new, *implied)))}")


def text_of(occurrence: Occurrence) -> str:
    """Returns the flag and its words as they were written."""
    return " ".join((occurrence.spelling, *occurrence.words))


_POSITIONS = "--position-embedding-type"

_FULL_RECOMPUTATION = frozenset({"--activations-checkpoint-method", "--checkpoint-activations"})
_FULL = Occurrence("--recompute-granularity", ("full",))

_OF_TODAY = {f"--{old}": f"--{name}" for old, name in TABLES["other_names"].items()}
"""Flags of today's Megatron-LM that have another name here."""
_RENAMED = _OF_TODAY | {f"--{old}": f"--{name}" for old, name in TABLES["renamed"].items()}

_NOW = {
    "--use-rotary-position-embeddings": Occurrence("--position-embedding-type", ("rope",)),
    "--fp8-e4m3": Occurrence("--fp8-format", ("e4m3",)),
    "--fp8-hybrid": Occurrence("--fp8-format", ("hybrid",)),
}

_QK_DECAY, _QK_WORDS = "--no-weight-decay-cond-type", ("apply_wd_to_qk_layernorm",)
_GPT_OSS = "--enable-gpt-oss"
_GPT_OSS_POSITIONS = tuple(
    Occurrence(*words)
    for words in (
        ("--position-embedding-type", ("rope",)),
        ("--rope-scaling-type", ("yarn",)),
        ("--rope-scaling-factor", ("32",)),
        ("--rope-scaling-original-length", ("4096",)),
        ("--no-rope-scaling-truncate", ()),
    )
)
"""The rotary positions of gpt-oss, as its config.json has them."""

_DEEPSPEED = "--deepspeed"
"""Flag of DeepSpeed's launcher; in scripts of Transformers it has a file."""

_NO_POSITIONS = _becomes(Occurrence("--no-position-embedding"), (), implied=(Occurrence(_POSITIONS, ("none",)),))
_SAID_ELSEWHERE = f"--no-position-embedding: retired; {_POSITIONS} sets the positions"

_GONE = reasons("retired")

REFUSED = reasons("retired_and_refused")
"""Flags of older releases that would change the result or the layout, and what to give instead."""

RETIRED = frozenset({"--no-position-embedding", _GPT_OSS, _QK_DECAY, *_FULL_RECOMPUTATION, *_RENAMED, *_NOW, *_GONE})
"""All flags that `translate` replaces."""
