"""Compiled scanners that cut UTF-8 text into the words within which BPE merges.

A scanner is a regular expression written as a loop. The classes of code points (letter, number, space) come from a
table, so that they equal those of the library whose words it must reproduce.
"""

from typing import Any

import numpy as np

from megatron.core.utils.compiled import compiled, compiled_inline

# Classes of a code point in the regular expressions that cut words.
OTHER, LETTER, NUMBER, SPACE = 0, 1, 2, 3

_APOSTROPHE, _BLANK = 39, 32


@compiled_inline
def _class_at(text: Any, i: Any, classes: Any) -> Any:
    """Returns the class of the code point at byte i, and its length in bytes. The text must be valid UTF-8."""
    byte = np.int64(text[i])
    if byte < 0x80:
        return np.int64(classes[byte]), 1
    second = np.int64(text[i + 1]) & 0x3F
    if byte < 0xE0:
        return np.int64(classes[(byte & 0x1F) << 6 | second]), 2
    third = np.int64(text[i + 2]) & 0x3F
    if byte < 0xF0:
        return np.int64(classes[(byte & 0x0F) << 12 | second << 6 | third]), 3
    fourth = np.int64(text[i + 3]) & 0x3F
    return np.int64(classes[(byte & 0x07) << 18 | second << 12 | third << 6 | fourth]), 4


@compiled
def _end_of_run(text: Any, i: Any, end: Any, kind: Any, classes: Any) -> Any:
    while i < end:
        found, width = _class_at(text, i, classes)
        if found != kind:
            break
        i += width
    return i


@compiled
def _end_of_spaces(text: Any, i: Any, end: Any, classes: Any) -> Any:
    r"""\s+(?!\S)|\s+ : a run of spaces leaves its last one to the word that follows."""
    last = i
    j = i
    while j < end:
        found, width = _class_at(text, j, classes)
        if found != SPACE:
            break
        last = j
        j += width
    return j if j == end or last == i else last


@compiled
def _contraction(text: Any, i: Any, end: Any, fold: Any) -> Any:
    """Returns the length of 's 't 'm 'd 're 've 'll at byte i, or 0. `fold` ignores case: U+017F (long s) is an s."""
    if text[i] != _APOSTROPHE or i + 1 >= end:
        return 0
    first = np.int64(text[i + 1])
    if fold and first == 0xC5 and i + 2 < end and text[i + 2] == 0xBF:
        return 3
    if fold and 65 <= first <= 90:
        first += 32
    if first == 115 or first == 116 or first == 109 or first == 100:
        return 2
    if i + 2 >= end:
        return 0
    second = np.int64(text[i + 2])
    if fold and 65 <= second <= 90:
        second += 32
    if (first == 114 and second == 101) or (first == 118 and second == 101) or (first == 108 and second == 108):
        return 3
    return 0


@compiled
def _gpt2_word(text: Any, i: Any, end: Any, classes: Any) -> Any:
    r"""Returns the end of the word at byte i:
    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    short = _contraction(text, i, end, False)
    if short > 0:
        return i + short
    kind, width = _class_at(text, i, classes)
    if kind != SPACE:
        return _end_of_run(text, i + width, end, kind, classes)
    if text[i] == _BLANK and i + 1 < end:
        kind, width = _class_at(text, i + 1, classes)
        if kind != SPACE:
            return _end_of_run(text, i + 1 + width, end, kind, classes)
    return _end_of_spaces(text, i, end, classes)


@compiled
def _is_line_end(byte: Any) -> Any:
    return byte == 10 or byte == 13


@compiled
def _cl100k_word(text: Any, i: Any, end: Any, classes: Any, max_digits: Any) -> Any:
    r"""Returns the end of the word at byte i, n = `max_digits`:

    (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,n}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
    """
    short = _contraction(text, i, end, True)
    if short > 0:
        return i + short
    kind, width = _class_at(text, i, classes)
    if kind == LETTER:
        return _end_of_run(text, i + width, end, LETTER, classes)
    if kind == NUMBER:
        j = i + width
        for _ in range(max_digits - 1):
            if j >= end:
                break
            kind, width = _class_at(text, j, classes)
            if kind != NUMBER:
                break
            j += width
        return j
    following = np.int64(-1)
    following_width = 0
    if i + width < end:
        following, following_width = _class_at(text, i + width, classes)
    if following == LETTER and not _is_line_end(text[i]):
        return _end_of_run(text, i + width + following_width, end, LETTER, classes)
    if kind == OTHER or (text[i] == _BLANK and following == OTHER):
        j = _end_of_run(text, i + width, end, OTHER, classes)
        while j < end and _is_line_end(text[j]):
            j += 1
        return j
    j = i
    after_line_end = i
    while j < end:
        kind, width = _class_at(text, j, classes)
        if kind != SPACE:
            break
        j += width
        if _is_line_end(text[j - width]):
            after_line_end = j
    if after_line_end > i:
        return after_line_end
    return _end_of_spaces(text, i, end, classes)


@compiled
def cut_gpt2(text: Any, bounds: Any, classes: Any, ends: Any, counts: Any) -> Any:
    """Cuts the texts bounds[k]:bounds[k + 1] by GPT-2's expression.

    Writes the ends of the words to `ends` (int32, with room for one per byte), and the number of words of each text to
    `counts`. Returns the number of all words.
    """
    total = 0
    for k in range(bounds.size - 1):
        i = bounds[k]
        before = total
        while i < bounds[k + 1]:
            i = _gpt2_word(text, i, bounds[k + 1], classes)
            ends[total] = i
            total += 1
        counts[k] = total - before
    return total


@compiled
def cut_cl100k(text: Any, bounds: Any, classes: Any, max_digits: Any, ends: Any, counts: Any) -> Any:
    """Cuts texts like `cut_gpt2`, by cl100k's expression with at most `max_digits` digits in a word."""
    total = 0
    for k in range(bounds.size - 1):
        i = bounds[k]
        before = total
        while i < bounds[k + 1]:
            i = _cl100k_word(text, i, bounds[k + 1], classes, max_digits)
            ends[total] = i
            total += 1
        counts[k] = total - before
    return total
