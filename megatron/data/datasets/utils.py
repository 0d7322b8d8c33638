"""Parses splits such as "969,30,1" and blends such as "30 a 70 b"."""

import itertools
import math
import os
import re
from collections.abc import Sequence
from enum import Enum

import numpy as np

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json, read_regular_file
from megatron.core.utils.warn import warn_on_first_rank

DEFAULT_SPLIT = "969,30,1"

Blend = tuple[list[str], list[float] | None]
"""Prefixes of .bin/.idx pairs, and their weights (None: no weights)."""
SplitMatrix = list[tuple[float, float] | None]
"""For each split its share of the data as (begin, end) in [0, 1]; None: an empty share."""


class Split(Enum):
    """The three parts of the data."""

    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Does nothing, and says so once: numba compiles the index functions when they are first called."""
    warn_on_first_rank("compile_helpers(): nothing to do, index functions are compiled when they are first called")


def normalize(weights: Sequence[float]) -> list[float]:
    """Returns the weights divided by their float64 sum, in numpy's order of summation, because sample orders depend on
    the last bit."""
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()


def parse_split(split: str) -> list[float]:
    """Returns the three shares of a string like "969,30,1", "90/5/5" or "1", with sum 1. Missing shares are 0.

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
    if numbers and not any(numbers):
        raise UserError(f"--split {split}: all shares are 0; expected shares such as {DEFAULT_SPLIT}")
    if not 1 <= len(numbers) <= 3 or other:
        raise UserError(f"--split {split}: expected up to three shares, none negative, such as {DEFAULT_SPLIT}")
    return normalize(numbers + [0.0] * (3 - len(numbers)))


def split_matrix(shares: Sequence[float]) -> SplitMatrix:
    """Returns (begin, end) of each share in [0, 1], None for a share of 0.

    Shares are added from left to right without correction, so the last end may differ from 1 by a rounding error. The
    sequences of a split follow from exactly these numbers.
    """
    ends: list[float] = [0]
    for share in shares:
        ends.append(ends[-1] + share)
    return [(begin, end) if end > begin else None for begin, end in itertools.pairwise(ends)]


def split_bounds(share: tuple[float, float], count: int) -> tuple[int, int]:
    """Returns the begin and end of a share's elements, out of `count` elements. Halves are rounded to even."""
    begin, end = share
    return round(begin * float(count)), round(end * float(count))


def get_blend_from_list(words: Sequence[str] | None, source: str = "--data-path") -> Blend | None:
    """Parses the words of --data-path: prefixes, or pairs of weight and prefix. Returns None if there are no words.

    Words are prefixes if their number is odd, or if no word in a weight's position is a number. Raises UserError if
    only some weights are numbers, if a weight is negative or infinite, or if all are zero; it names `source`.
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
                f"{source}: {word!r} is in the position of a weight; "
                "give pairs of weight and prefix, or prefixes without weights"
            )
    try:
        return words[1::2], check_weights([weight for weight in weights if weight is not None])
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def check_weights(weights: Sequence[float]) -> list[float]:
    """Returns the weights as floats. Raises UserError if one is negative or not finite, or if all are zero."""
    for weight in weights:
        if not math.isfinite(weight) or weight < 0:
            raise UserError(f"blend weight {weight}: expected a finite number, zero or more")
    if not 0 < sum(weights) < math.inf:
        expected = "their sum must be finite" if sum(weights) else "at least one must be above zero"
        raise UserError(f"blend weights {list(weights)}: {expected}")
    return [float(weight) for weight in weights]


def read_blend_file(path: str | os.PathLike[str]) -> Blend | None:
    """Reads the blend of a --data-args-path file: the words of --data-path, separated by blanks or newlines. Raises
    UserError."""
    source = f"--data-args-path {path}"
    return get_blend_from_list(_read_text(path, "--data-args-path").split(), source)


def read_blend_per_split_file(path: str | os.PathLike[str]) -> list[Blend | None]:
    """Reads the blends of a --per-split-data-args-path file: JSON with the keys train, valid and test.

    A value is a list of the words of --data-path, or a string with them. A missing key is a split without data. Raises
    UserError.
    """
    try:
        values = parse_json(_read_text(path, "--per-split-data-args-path"))
    except ValueError as error:
        raise UserError(f"--per-split-data-args-path {path}: not JSON ({error})") from None
    if not isinstance(values, dict) or not set(values) <= {split.name for split in Split}:
        raise UserError(f"--per-split-data-args-path {path}: expected an object with keys train, valid, test")
    found = []
    for split in Split:
        entry = values.get(split.name) or []
        source = f"--per-split-data-args-path {path}: {split.name}"
        if not isinstance(entry, str | list):
            raise UserError(f"{source}: expected a list of words or a text, not {entry!r:.40}")
        words = entry.split() if isinstance(entry, str) else [str(word) for word in entry]
        found.append(get_blend_from_list(words, source))
    return found


def _read_text(path: str | os.PathLike[str], flag: str) -> str:
    try:
        return read_regular_file(path).decode()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {path}: not a text in UTF-8 (byte {error.start})") from None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
