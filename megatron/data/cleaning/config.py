"""The flags of tools/dedup.py and tools/filter_data.py."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag
from megatron.data.preparation.config import available_cores


@dataclass(kw_only=True, frozen=True)
class DedupConfig:
    """Input, output and what counts as a duplicate."""

    input: list[str] | None = None
    """Files, patterns and folders, as tools/preprocess_data.py reads them. Required."""

    output: str | None = None
    """New folder for the kept rows, a .jsonl file for each input file, and report.json. Required."""

    method: Literal["exact", "minhash", "both"] = "both"
    """exact: drop texts that are equal to an earlier one. minhash: drop texts that are similar to an earlier one, which
    equal texts are too. both: the same as minhash, with separate counts in the report."""

    threshold: float = flag(0.8, only_with="method=minhash|both")
    """Smallest Jaccard similarity of the sets of word 5-grams at which the later text is dropped."""

    level: Literal["document", "paragraph"] = "document"
    """document: drop rows. paragraph: remove repeated lines of five words and more from the texts, and drop rows of
    which nothing is left."""

    key: str = "text"
    """Key of the JSON objects that contains the text: a text, or a list of texts."""

    workers: int = flag(default_factory=available_cores)
    """Number of processes. It does not change the result."""

    on_error: Literal["stop", "skip"] = "stop"
    """What to do with a line that cannot be read: stop with an error that names it, or drop it and count it."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value. Looks at no file."""
        yield from _missing(self)
        if not 0 < self.threshold <= 1:
            yield "{threshold}: must be above 0 and at most 1"
        if self.workers < 1:
            yield "{workers}: must be at least 1"


@dataclass(kw_only=True, frozen=True)
class FilterConfig:
    """Input, output and the rules. A row is dropped by the first rule that it breaks, in the order of these flags."""

    input: list[str] | None = None
    """Files, patterns and folders, as tools/preprocess_data.py reads them. Required."""

    output: str | None = None
    """New folder for the kept rows, a .jsonl file for each input file, and report.json. Required."""

    min_characters: int = 1
    """Drop texts with fewer characters."""

    max_characters: int | None = None
    """Drop texts with more characters."""

    quality_rules: list[Literal["gopher", "gopher-repetition", "c4"]] | None = None
    """Published rules: those of Gopher for words, symbols and lines, those of Gopher for repetition, those of C4 for
    pages."""

    drop_if_matches: list[str] | None = None
    """Drop texts in which one of these regular expressions is found."""

    keep_if_matches: list[str] | None = None
    """Drop texts in which none of these regular expressions is found."""

    blocklist: str | None = None
    """File of words and phrases, one per line. Drop texts that contain one, in any case, as whole words."""

    decontaminate: list[str] | None = None
    """Evaluation sets: files, patterns and folders as in --input. Drop texts that share an n-gram of words with one."""

    decontamination_key: str | None = flag(None, only_with="decontaminate")
    """Key of the texts of the evaluation sets. Default: that of --key."""

    ngram_words: int = flag(13, only_with="decontaminate")
    """Words of an n-gram that may not be shared with an evaluation set. Shorter texts of the set count as a whole."""

    key: str = "text"
    """Key of the JSON objects that contains the text: a text, or a list of texts."""

    workers: int = flag(default_factory=available_cores)
    """Number of processes. It does not change the result."""

    on_error: Literal["stop", "skip"] = "stop"
    """What to do with a line that cannot be read: stop with an error that names it, or drop it and count it."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value. Looks at no file."""
        yield from _missing(self)
        for field in ("workers", "ngram_words"):
            if getattr(self, field) < 1:
                yield f"{{{field}}}: must be at least 1"
        if self.min_characters < 0:
            yield "{min_characters}: must be at least 0"
        if self.max_characters is not None and self.max_characters < self.min_characters:
            yield "{max_characters}: must be at least {min_characters}"
        for field in ("drop_if_matches", "keep_if_matches"):
            for pattern in getattr(self, field) or ():
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield f"{{{field}:name}}: {pattern!r} is no regular expression: {error}"


CleaningConfig = DedupConfig | FilterConfig


def _missing(config: CleaningConfig) -> Iterator[str]:
    if not config.input:
        yield "{input:name}: missing; give .jsonl files (also compressed), Parquet files or folders of them"
    if not config.output:
        yield "{output:name}: missing; give a new folder"
