"""Flags of older releases that published commands still use, and what they are today."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Occurrence:
    """A flag where it stands on the command line, with its words."""

    spelling: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Translation:
    """What a retired flag becomes, and the line that says so."""

    occurrences: tuple[Occurrence, ...]
    implied: tuple[Occurrence, ...]
    warning: str


def translate_all(occurrences: list[Occurrence]) -> tuple[list[Occurrence], list[str]]:
    """The command line with retired flags replaced by those of today, and a warning for each.

    What a retired flag only implies comes first, so that a flag that says otherwise wins.
    """
    implied: list[Occurrence] = []
    today: list[Occurrence] = []
    warnings: dict[str, None] = {}
    for occurrence in occurrences:
        translation = translate(occurrence)
        if translation is None:
            today.append(occurrence)
        else:
            implied += translation.implied
            today += translation.occurrences
            warnings[translation.warning] = None
    if any(occurrence.spelling == _POSITIONS for occurrence in today) and _NO_POSITIONS.warning in warnings:
        warnings = {_SAID_ELSEWHERE if line == _NO_POSITIONS.warning else line: None for line in warnings}
    return implied + today, list(warnings)


def translate(occurrence: Occurrence) -> Translation | None:
    """The flags of today for a retired one; None if it is not retired."""
    spelling, words = occurrence.spelling, occurrence.words
    if spelling in _FULL_RECOMPUTATION:
        method = Occurrence("--recompute-method", words or ("uniform",))
        return _becomes(occurrence, (_FULL, method), implied=(Occurrence("--recompute-num-layers", ("1",)),))
    if spelling == "--no-position-embedding":  # beside --use-rotary-position-embeddings it only means: not learnt ones
        return _NO_POSITIONS
    if spelling in _RENAMED:
        return _becomes(occurrence, (Occurrence(_RENAMED[spelling], words),))
    if spelling in _NOW:
        return _becomes(occurrence, (_NOW[spelling],))
    if spelling in _GONE:
        return Translation((), (), f"{text_of(occurrence)}: retired and ignored: {_GONE[spelling]}")
    return None


def _becomes(old: Occurrence, new: tuple[Occurrence, ...], implied: tuple[Occurrence, ...] = ()) -> Translation:
    return Translation(new, implied, f"{text_of(old)}: retired; taken as {' '.join(map(text_of, (*new, *implied)))}")


def text_of(occurrence: Occurrence) -> str:
    """A flag as it was written."""
    return " ".join((occurrence.spelling, *occurrence.words))


_POSITIONS = "--position-embedding-type"
_NO_POSITIONS = _becomes(Occurrence("--no-position-embedding"), (), implied=(Occurrence(_POSITIONS, ("none",)),))
_SAID_ELSEWHERE = f"--no-position-embedding: retired; the positions are those of {_POSITIONS}"

_FULL_RECOMPUTATION = frozenset({"--activations-checkpoint-method", "--checkpoint-activations"})
_FULL = Occurrence("--recompute-granularity", ("full",))

_RENAMED = {
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
}

_NOW = {
    "--use-rotary-position-embeddings": Occurrence("--position-embedding-type", ("rope",)),
}

_GONE = {
    "--DDP-impl": "there is one data parallel implementation",
    "--dataset-impl": "indexed data files are mapped into memory",
    "--no-contiguous-buffers-in-local-ddp": "gradients always lie in contiguous buffers",
    "--no-scatter-gather-tensors-in-pipeline": "pipeline stages exchange what each needs",
    "--onnx-safe": "it belonged to an exporter",
}

REFUSED = {
    "--moe-router-topk-limited-devices": "of older releases; it would make a token's experts depend on the number of "
    "expert parallel ranks; set --moe-router-num-groups to that number and --moe-router-group-topk to this one",
}
"""Flags of older releases that stand for something else on every layout, and the way that works."""

RETIRED = frozenset({"--no-position-embedding", *_FULL_RECOMPUTATION, *_RENAMED, *_NOW, *_GONE})
"""Every flag that `translate` knows."""
