"""Divides texts into sentences: nltk's punkt if its data is on this machine, otherwise rules.

Both are deterministic and work on one text at a time, so the number of workers does not change the sentences.
"""

import os
import re
from collections.abc import Callable
from typing import Any, Protocol

PUNKT_CHARACTERS = 1_000_000
"""punkt gets a text in parts of this many characters, as in Megatron-LM."""


class SentenceSplitter(Protocol):
    """Divides a text into sentences. Can be pickled."""

    name: str
    """Name of the method in the log and in the manifest."""

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text, none of them empty."""


def build_splitter(language: str, keep_newlines: bool, warn: Callable[[str], None]) -> SentenceSplitter:
    """Returns punkt for this language if nltk and its `punkt_tab` data are installed. Otherwise warns and returns the
    rules. The environment variable NLTK_DATA names the folder of the data. Nothing is downloaded."""
    try:
        return PunktSplitter(language, keep_newlines)
    except _PunktMissing as reason:
        of_english = "" if language == "english" else "; they know English abbreviations only"
        warn(
            f"--split-sentences: sentences are found by rules, not by nltk's punkt: {reason}{of_english}. To use "
            f"punkt, install nltk and set NLTK_DATA to a folder with tokenizers/punkt_tab/{language}"
        )
        return RuleSplitter(keep_newlines)


def join_spans(text: str, starts: list[int], keep_newlines: bool) -> list[str]:
    """Returns the parts of a text that begin at these positions. Blanks around a part are removed; with
    `keep_newlines`, those after it stay."""
    parts = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    return [part if keep_newlines else part.strip() for part in parts if part.strip()]


# ---------------------------------------------------------------------------------------------------------------------
# punkt (Kiss & Strunk 2006)


class _PunktMissing(Exception):
    """nltk or its data is not installed. The message says which."""


class PunktSplitter:
    """nltk's punkt with the trained parameters of a language, read from tables (`punkt_tab`), never from a pickle."""

    def __init__(self, language: str, keep_newlines: bool) -> None:
        try:
            from nltk.tokenize.punkt import PunktTokenizer
        except ImportError as error:
            raise _PunktMissing(f"nltk is not installed ({error})") from None
        try:
            self._punkt: Any = PunktTokenizer(language)
        except (LookupError, ValueError, OSError):
            folder = os.environ.get("NLTK_DATA")
            where = f"NLTK_DATA={folder}" if folder else "nltk's usual folders"
            raise _PunktMissing(f"no tokenizers/punkt_tab/{language} in {where}") from None
        self._keep_newlines = keep_newlines
        self.name = f"nltk punkt, {language}"

    def split(self, text: str) -> list[str]:
        """Returns the sentences. A very long text is split in parts of PUNKT_CHARACTERS."""
        sentences: list[str] = []
        for begin in range(0, len(text), PUNKT_CHARACTERS):
            part = text[begin : begin + PUNKT_CHARACTERS]
            starts = [start for start, _ in self._punkt.span_tokenize(part)]
            sentences += join_spans(part, starts, self._keep_newlines)
        return sentences


# ---------------------------------------------------------------------------------------------------------------------
# Rules

_MARKS = ".!?…؟।॥"
_ENDS = re.compile(
    rf"""(?:
        (?<![{_MARKS}]) (?P<marks> [{_MARKS}]++ ) ["'”’»)\]]*+ (?=\s)  # end marks, then closing marks, before a blank
      | [。！？]++ ["'”’」』）]*+                                      # ideographic marks, which no blank follows
      | (?<!\s) (?= [^\S\n]*\n[^\S\n]*\n )                            # a blank line
    )\s*+""",
    re.VERBOSE,
)
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_SAME_SENTENCE = re.compile(r"[\"'“‘«(\[]*[a-z,;:]")
"""Text after end marks that belongs to the same sentence."""
_OPENING = "\"'“‘«(["
_LONGEST_ABBREVIATION = 24
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
"""A letter, or letters with dots between them: initials, or abbreviations such as e.g and U.S."""
_ENGLISH = """
    mr mrs ms dr prof rev hon st sr jr gen col maj capt lt sgt cmdr adm gov sen rep pres messrs mme mlle esq
    vs etc al cf ca approx dept univ assn bros inc ltd co corp est fig figs eq eqs ref refs sec sect ch chap vol vols
    no nos pp ed eds trans viz ibid op cit jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat sun
    ave blvd rd mt ft min max avg
"""
_ABBREVIATIONS = frozenset(_ENGLISH.split())


class RuleSplitter:
    """Finds sentences by end marks and blank lines.

    A dot ends no sentence after an abbreviation, an initial or the number of a list item. No mark ends a sentence
    before a lower-case letter.
    """

    name = "rules"

    def __init__(self, keep_newlines: bool = False) -> None:
        self._keep_newlines = keep_newlines

    def split(self, text: str) -> list[str]:
        """Returns the sentences."""
        starts = [0]
        for match in _ENDS.finditer(text):
            if _ends_sentence(text, starts[-1], match):
                starts.append(match.end())
        return join_spans(text, starts, self._keep_newlines)


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether the marks or blank line found by `match` end the sentence that begins at `start`."""
    marks, found = match["marks"], match[0]
    if marks is None or ("\n" in found and _BLANK_LINE.search(found)):
        return True
    if _SAME_SENTENCE.match(text, match.end()):
        return False
    if marks != "." or not found[1].isspace():
        return True
    # Looks back only as far as the longest abbreviation, so that a very long word with many dots takes linear time.
    before = text[max(start, match.start() - _LONGEST_ABBREVIATION) : match.start()]
    word = before.split()[-1].lstrip(_OPENING) if before and not before[-1].isspace() else ""
    if word.isdecimal():
        return len(before.strip()) > len(word)
    return word == "I" or not (word.lower() in _ABBREVIATIONS or _INITIALS.fullmatch(word))
