"""What tools/preprocess_data.py is told, besides the tokenizer's flags."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_yet

_SENTENCES = "sentences are not split"


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(kw_only=True, frozen=True)
class PreparationConfig:
    """Input and output."""

    input: list[str] | None = None
    """Files of JSON objects, one a line (.jsonl, or .jsonl.gz); patterns such as 'part-*.jsonl' are filled in, in order
    of names. Required."""

    output_prefix: str | None = None
    """Where the data set goes: PREFIX_KEY_document.bin, .idx and .manifest.json for each key. Required."""

    json_keys: list[str] = flag(default_factory=lambda: ["text"])
    """Keys to take text from, a data set each. A value is a text, or a list of texts: the document's sequences."""

    append_eod: bool = False
    """End every document that has tokens with the end-of-document token."""

    workers: int = flag(default_factory=available_cores)
    """Processes. The result is the same for any number."""

    on_error: Literal["stop", "skip"] = "stop"
    """At a line that is not what it must be: stop, naming it; or skip it and count it."""

    max_line_bytes: int = 256 << 20
    """Bytes of the longest line that is taken; memory grows with the longest line, and with nothing else."""

    partitions: int = 1
    """Order of documents: line i is in part i modulo this number, and parts follow each other."""

    keep_sequential_samples: bool = False
    """With --partitions: parts are contiguous, so that the order is the input's."""

    log_interval: int = 1000
    """Documents between two lines of progress, at least; in a file there is one every ten seconds at most."""

    split_sentences: bool = not_yet(False)
    """Make each sentence a sequence of its document."""

    keep_newlines: bool = flag(False, no_effect=_SENTENCES)
    """With --split-sentences: keep line ends."""

    lang: str = flag("english", no_effect=_SENTENCES)
    """With --split-sentences: language of the text."""

    dataset_impl: str | None = flag(None, no_effect="there is one format, .bin and .idx")
    """Of older releases: format of the output."""

    chunk_size: int | None = flag(None, no_effect="workers take blocks of the input")
    """Of older releases: lines handed to a worker at a time."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`. Looks at no file."""
        if not self.input:
            yield "{input:name}: missing; give one or more .jsonl or .jsonl.gz files"
        if not self.output_prefix:
            yield "{output_prefix:name}: missing; give the path of the data set, without .bin"
        if len(set(self.json_keys)) < len(self.json_keys):
            yield "{json_keys}: a key is given twice"
        if any("/" in key for key in self.json_keys):
            yield "{json_keys}: a key with a slash cannot be part of a file name"
        for field in ("workers", "max_line_bytes", "partitions", "log_interval"):
            if getattr(self, field) < 1:
                yield f"{{{field}}}: must be at least 1"
        if self.max_line_bytes > 1 << 30:
            yield f"{{max_line_bytes}}: must be at most {1 << 30}"
