"""The flags of tools/preprocess_data.py, except for the tokenizer's."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag


def available_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(kw_only=True, frozen=True)
class PreparationConfig:
    """Input and output."""

    input: list[str] | None = None
    """Files with one JSON object per line (plain, .gz, .xz or .zst), Parquet files, text files (.txt, .md) and folders
    of Hugging Face's save_to_disk. Patterns such as 'part-*.jsonl' and folders are expanded in alphabetical order.
    Required."""

    output_prefix: str | None = None
    """Prefix of the output: PREFIX_KEY_document.bin, .idx and .manifest.json for each key (PREFIX_KEY_sentence with
    --split-sentences). Required."""

    json_keys: list[str] = flag(default_factory=lambda: ["text"])
    """Keys of the JSON objects that contain text; each key makes one data set. A value is a text, or a list of texts,
    which become the sequences of the document."""

    document_separator: str | None = None
    """Text that separates the documents of .txt and .md files, such as '<|endoftext|>'. Default: a file is a
    document."""

    append_eod: bool = False
    """Append the end-of-document token to every document that has tokens."""

    workers: int = flag(default_factory=available_cores)
    """Number of processes. It does not change the result."""

    on_error: Literal["stop", "skip"] = "stop"
    """What to do with a bad line: stop with an error that names it, or skip it and count it."""

    max_line_bytes: int = 256 << 20
    """Length of the longest line that is accepted, in bytes. Memory grows with the longest line only."""

    partitions: int = 1
    """Changes the order of documents. Line i belongs to part i modulo this number, and the parts are written one after
    the other."""

    keep_sequential_samples: bool = False
    """With --partitions: make the parts contiguous, so that documents keep the order of the input."""

    log_interval: int = 1000
    """Smallest number of documents between two progress lines. In a file, progress lines are at least ten seconds
    apart."""

    split_sentences: bool = False
    """Make each sentence a sequence of its document, as BERT and T5 need it; the output is PREFIX_KEY_sentence.
    Sentences are found by nltk's punkt if its data (punkt_tab) is in the folder that NLTK_DATA names, otherwise by
    rules. Each text of a list counts as one sentence."""

    keep_newlines: bool = flag(False, only_with="split_sentences")
    """With --split-sentences: keep the newlines and blanks after a sentence."""

    lang: str = flag("english", only_with="split_sentences")
    """With --split-sentences: language of the text, for punkt."""

    deduplication: Literal["exact-match", "minhash", "both", "none"] | None = None
    """Method by which the input was deduplicated before, for the manifest; a plan's data contract may ask for it. The
    tool itself removes no documents."""

    dataset_impl: str | None = flag(None, no_effect="there is one format, .bin and .idx")
    """Older releases: format of the output."""

    chunk_size: int | None = flag(None, no_effect="workers process blocks of the input")
    """Older releases: lines that a worker gets at a time."""

    @property
    def level(self) -> str:
        """Last word of the output's prefix."""
        return "sentence" if self.split_sentences else "document"

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`. Looks at no file."""
        if not self.input:
            yield "{input:name}: missing; give .jsonl files (also .gz, .zst), Parquet files or folders of them"
        if not self.output_prefix:
            yield "{output_prefix:name}: missing; give the path of the data set, without .bin"
        if self.document_separator == "":
            yield "{document_separator}: empty; leave the flag out if each file is a document"
        if len(set(self.json_keys)) < len(self.json_keys):
            yield "{json_keys}: a key is given twice"
        if not self.lang.isidentifier():
            yield "{lang}: not the name of a language, such as english"
        if any("/" in key for key in self.json_keys):
            yield "{json_keys}: a key with a slash cannot be part of a file name"
        for field in ("workers", "max_line_bytes", "partitions", "log_interval"):
            if getattr(self, field) < 1:
                yield f"{{{field}}}: must be at least 1"
        if self.max_line_bytes > 1 << 30:
            yield f"{{max_line_bytes}}: must be at most {1 << 30}"
