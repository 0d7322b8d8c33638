"""Rules of quality that need no model: those of Gopher and of C4, of length, and of phrases.

Gopher: Rae et al., "Scaling Language Models" (2021), section A.1.1 and table A1. C4: Raffel et al., "Exploring the
Limits of Transfer Learning" (2020), section 2.2. Rules about English words are left out: Gopher's stop words and C4's
language detection; so is C4's list of words, which `--blocklist` takes.
"""

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from megatron.data.cleaning.shingles import hashes_in_order

_BULLETS = ("-", "*", "•", "‣", "●", "◦")
_ELLIPSES = ("...", "…")
_GOPHER_TOP = {2: 0.20, 3: 0.18, 4: 0.16}
"""Largest share of the characters in the most frequent n-gram, by n."""
_GOPHER_DUPLICATED = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
"""Largest share of the characters in n-grams that occur more than once, by n."""
_SENTENCE_ENDS = (".", "!", "?", '"', "”", "。", "！", "？", "」")
_LEAST_SENTENCES = 3
_SENTENCE_END = re.compile(r"[.!?。！？]+[\"”」')\]]*(?=\s|$)|[。！？]")


def gopher_quality(text: str) -> str | None:
    """Returns the first of Gopher's rules of quality that a text breaks; None if it breaks none."""
    words = text.split()
    count = len(words)
    if not 50 <= count <= 100_000:
        return "gopher: words"
    if not 3 <= sum(map(len, words)) / count <= 10:
        return "gopher: mean word length"
    if text.count("#") > 0.1 * count or sum(map(text.count, _ELLIPSES)) > 0.1 * count:
        return "gopher: symbols per word"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if sum(line.startswith(_BULLETS) for line in lines) > 0.9 * len(lines):
        return "gopher: lines that begin with a bullet"
    if sum(line.endswith(_ELLIPSES) for line in lines) > 0.3 * len(lines):
        return "gopher: lines that end with an ellipsis"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * count:
        return "gopher: words with a letter"
    return None


def gopher_repetition(text: str) -> str | None:
    """Returns the first of Gopher's rules of repetition (table A1) that a text breaks; None if it breaks none."""
    for name, parts, most_parts, most_characters in (
        ("lines", _parts(text, r"\n+"), 0.30, 0.20),
        ("paragraphs", _parts(text, r"\n\s*\n"), 0.30, 0.20),
    ):
        repeated = [part for part, times in Counter(parts).items() for _ in range(times - 1)]
        if len(repeated) > most_parts * len(parts):
            return f"gopher: duplicate {name}"
        if sum(map(len, repeated)) > most_characters * len(text):
            return f"gopher: characters in duplicate {name}"
    ends = np.cumsum([0, *map(len, text.split())])  # characters before each word
    for n, most in _GOPHER_TOP.items():
        if _top_characters(text, ends, n) > most * ends[-1]:
            return f"gopher: characters in the most frequent {n}-gram"
    for n, most in _GOPHER_DUPLICATED.items():
        if _duplicated_characters(text, ends, n) > most * ends[-1]:
            return f"gopher: characters in duplicate {n}-grams"
    return None


def _parts(text: str, separator: str) -> list[str]:
    return [part.strip() for part in re.split(separator, text) if part.strip()]


def _top_characters(text: str, ends: np.ndarray, n: int) -> int:
    """Characters of all occurrences of the most frequent n-gram; 0 if none occurs twice."""
    if len(ends) <= n:
        return 0
    _, first, times = np.unique(hashes_in_order(text, n), return_index=True, return_counts=True)
    first = first[times == times.max()]
    return int(times.max() * (ends[first + n] - ends[first]).max()) if times.max() > 1 else 0


def _duplicated_characters(text: str, ends: np.ndarray, n: int) -> int:
    """Characters of the words that are in an n-gram which occurred before, each counted once."""
    if len(ends) <= n:
        return 0
    _, first, gram = np.unique(hashes_in_order(text, n), return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first[gram] < np.arange(gram.size))
    changes = np.zeros(len(ends), np.int64)
    np.add.at(changes, repeated, 1)
    np.add.at(changes, repeated + n, -1)
    return int(np.diff(ends)[np.cumsum(changes)[:-1] > 0].sum())


def c4_lines(text: str) -> str:
    """Returns the lines that C4 keeps: of at least five words, with a mark that ends a sentence, without the word
    "javascript"."""
    return "\n".join(line for line in text.splitlines() if _c4_keeps(line.strip()))


def _c4_keeps(line: str) -> bool:
    return line.endswith(_SENTENCE_ENDS) and len(line.split(None, 5)) >= 5 and "javascript" not in line.lower()


def c4(text: str) -> str | None:
    """Returns the first of C4's rules for pages that a text breaks; None if it breaks none. Lines that C4 would remove
    do not count as sentences."""
    lowered = text.lower()
    if "lorem ipsum" in lowered:
        return "c4: lorem ipsum"
    if "{" in text:
        return "c4: curly bracket"
    if sum(1 for _ in _SENTENCE_END.finditer(c4_lines(text))) < _LEAST_SENTENCES:
        return "c4: sentences"
    return None


def lengths(text: str, least: int, most: int | None) -> str | None:
    """Returns the rule of length that a text breaks: characters from `least` to `most`."""
    if len(text) < least:
        return "length: too short"
    return "length: too long" if most is not None and len(text) > most else None


def compile_blocklist(lines: Iterator[str]) -> re.Pattern[str] | None:
    """Returns a pattern for the phrases of a list, one per line, as whole words in any case; None for an empty list."""
    phrases = sorted({line.strip() for line in lines if line.strip()}, key=lambda phrase: (-len(phrase), phrase))
    if not phrases:
        return None
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, phrases))})(?!\w)", re.IGNORECASE)
