"""The flags of tools/dedup.py."""

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
        if not self.input:
            yield "{input:name}: missing; give .jsonl files (also compressed), Parquet files or folders of them"
        if not self.output:
            yield "{output:name}: missing; give a new folder"
        if not 0 < self.threshold <= 1:
            yield "{threshold}: must be above 0 and at most 1"
        if self.workers < 1:
            yield "{workers}: must be at least 1"
