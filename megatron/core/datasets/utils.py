"""What a run says about its data, in plain values: splits such as "969,30,1" and blends such as "30 a 70 b"."""

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import numpy as np

from megatron.core.exceptions import UserError

DEFAULT_SPLIT = "969,30,1"

# Prefixes of .bin/.idx pairs, and a weight for each (None: no weights were given).
Blend = tuple[list[str], list[float] | None]
# For each split its share of the whole as (begin, end) in [0, 1]; None: an empty share.
SplitMatrix = list[tuple[float, float] | None]


class Split(Enum):
    """The three parts of the data."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their float64 sum, in numpy's order of summation (sample orders depend on the last bit)."""
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()


def parse_split(split: str) -> list[float]:
    """The three shares of a string like "969,30,1", "90/5/5" or "1", normalised; missing ones are 0.

    Raises UserError unless the string consists of one to three numbers, none negative, with a positive sum, and of
    separators: blanks, commas, semicolons, slashes and quotes.
    """
    try:
        numbers = [float(word) for word in re.findall(r"[.0-9]+", split)]
    except ValueError:
        raise UserError(f"--split {split}: not a list of numbers such as {DEFAULT_SPLIT}") from None
    other = re.search(r"[^.0-9\s,;/'\"]+", split)
    if other and not other[0].startswith("-"):
        raise UserError(f"--split {split}: {other[0]!r} is not a number; expected shares such as {DEFAULT_SPLIT}")
    if not 1 <= len(numbers) <= 3 or sum(numbers) <= 0 or other:
        raise UserError(f"--split {split}: expected up to three shares, none negative, such as {DEFAULT_SPLIT}")
    return normalize(numbers + [0.0] * (3 - len(numbers)))


def split_matrix(shares: Sequence[float]) -> SplitMatrix:
    """Cumulated shares as (begin, end) for each split, None where the share is zero.

    Sums run from left to right and are not corrected: the last end may miss 1 by a rounding error, and the sequences
    that belong to a split follow from exactly these numbers.
    """
    ends: list[float] = [0]
    for share in shares:
        ends.append(ends[-1] + share)
    return [(begin, end) if end > begin else None for begin, end in itertools.pairwise(ends)]


def split_bounds(share: tuple[float, float], count: int) -> tuple[int, int]:
    """First and one past the last of `count` elements that belong to a share; halves round to even."""
    begin, end = share
    return round(begin * float(count)), round(end * float(count))


def get_blend_from_list(words: Sequence[str] | None) -> Blend | None:
    """Read the words of --data-path: prefixes, or pairs of weight and prefix.

    An odd number of words, or an even number of which none in a weight's place is a number, are prefixes. Raises
    UserError when some weights are numbers and others are not, or when a weight is negative, infinite or all are zero.
    """
    if not words:
        return None
    words = [word.strip() for word in words]
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 == 1 or all(weight is None for weight in weights):
        return words, None
    for word, weight in zip(words[::2], weights, strict=True):
        if weight is None:
            raise UserError(
                f"--data-path: {word!r} stands where a weight is expected; "
                "give pairs of weight and prefix, or prefixes without weights"
            )
    return words[1::2], check_weights([weight for weight in weights if weight is not None])


def check_weights(weights: Sequence[float]) -> list[float]:
    """The weights as floats; UserError for a negative or non-finite one, or when their sum is zero."""
    for weight in weights:
        if not math.isfinite(weight) or weight < 0:
            raise UserError(f"blend weight {weight}: expected a finite number, zero or more")
    if not sum(weights) > 0:
        raise UserError(f"blend weights {list(weights)}: at least one must be above zero")
    return [float(weight) for weight in weights]


def read_blend_file(path: str | os.PathLike[str]) -> Blend | None:
    """The blend of a --data-args-path file: the words of --data-path, separated by blanks or new lines."""
    return get_blend_from_list(_read_text(path, "--data-args-path").split())


def read_blend_per_split_file(path: str | os.PathLike[str]) -> list[Blend | None]:
    """The blends of a --per-split-data-args-path file: JSON with keys train, valid, test.

    A value is a list of the words of --data-path, or one string of them; a missing key is a split without data.
    """
    try:
        values = json.loads(_read_text(path, "--per-split-data-args-path"))
    except ValueError as error:
        raise UserError(f"--per-split-data-args-path {path}: not JSON ({error})") from None
    if not isinstance(values, dict) or not set(values) <= {split.name for split in Split}:
        raise UserError(f"--per-split-data-args-path {path}: expected an object with keys train, valid, test")
    words = [values.get(split.name) or [] for split in Split]
    return [
        get_blend_from_list(entry.split() if isinstance(entry, str) else [str(word) for word in entry])
        for entry in words
    ]


def _read_text(path: str | os.PathLike[str], flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
