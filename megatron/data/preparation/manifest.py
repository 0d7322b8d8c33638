"""The manifest of a data set: its inputs, its tokenizer, and the digests of its files."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json, read_regular_file, write_atomically
from megatron.data.datasets.object_store import exists, is_url, read_bytes
from megatron.data.tokenizer.base import Tokenizer

VERSION = 1


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that made the ids."""

    type: str
    digest: str
    vocab_size: int
    eod: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenizerRecord":
        """Returns the record of a tokenizer."""
        return cls(tokenizer.type_name, tokenizer.digest, tokenizer.vocab_size, tokenizer.eod)


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file of the data set."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class DataManifest:
    """The fields of a manifest's JSON."""

    tokenizer: TokenizerRecord
    key: str
    level: str
    append_eod: bool
    dtype: str
    documents: int
    sequences: int
    tokens: int
    documents_with_special_literals: int
    """Documents whose text contains the spelling of a special token."""
    special_literals_matched: bool
    """Whether these spellings became special tokens; otherwise they are ordinary text."""
    lines: int
    blank_lines: int
    dropped_lines: Mapping[str, int]
    """Number of lines that were left out (--on-error skip), by kind of fault."""
    inputs: tuple[Mapping[str, Any], ...]
    """Name and bytes of each input file."""
    files: Mapping[str, FileRecord]
    """Records of the files, by suffix: bin and idx."""
    sentences: str | None = None
    """Name of the method that divided the texts into sentences (--split-sentences); None: they were not divided."""
    deduplication: str | None = None
    """Method by which the input was deduplicated (--deduplication); None: not said."""

    cleaning: tuple[Mapping[str, object], ...] = ()
    """What tools/dedup.py and tools/filter_data.py have done to the input, in order: their settings and counts."""

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the manifest in one step."""
        write_atomically(path, json.dumps({"version": VERSION} | asdict(self), indent=2, ensure_ascii=False) + "\n")


CLEANING_REPORT = "report.json"
"""File of settings, counts and examples beside the rows that tools/dedup.py and tools/filter_data.py keep."""


def cleaning_of(paths: Iterable[str]) -> tuple[Mapping[str, object], ...]:
    """Returns the settings and counts of the tools that wrote these files, in the order in which they ran. Other files
    have none."""
    steps: list[Mapping[str, object]] = []
    for folder in dict.fromkeys(Path(path).parent for path in paths if not is_url(path)):
        try:
            report = parse_json((folder / CLEANING_REPORT).read_bytes())
            if report["tool"] in ("dedup", "filter"):
                steps += report["cleaned_before"]
                steps.append({key: value for key, value in report.items() if key not in _NOT_COUNTS})
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return tuple(steps)


_NOT_COUNTS = ("identity", "inputs", "examples", "cleaned_before")


def get_manifest_path(path_prefix: str) -> str:
    """Returns the path of a prefix's manifest."""
    return path_prefix + ".manifest.json"


def _text_of(path: str) -> str:
    if not is_url(path):
        return read_regular_file(path).decode()
    if not exists(path):
        raise FileNotFoundError(path)
    return read_bytes(path).decode()


def read_manifest(path_prefix: str) -> DataManifest | None:
    """Reads the manifest of a prefix; None if it has none. Raises UserError if it is invalid."""
    path = get_manifest_path(path_prefix)
    try:
        content = parse_json(_text_of(path))
        if content.pop("version") != VERSION:
            raise UserError(f"{path}: made by another release; prepare the data again, or remove the file")
        tokenizer = TokenizerRecord(**content.pop("tokenizer"))
        files = {suffix: FileRecord(**record) for suffix, record in content.pop("files").items()}
        inputs, cleaning = tuple(content.pop("inputs")), tuple(content.pop("cleaning", ()))
        return DataManifest(tokenizer=tokenizer, files=files, inputs=inputs, cleaning=cleaning, **content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; prepare the data again, or remove the file") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a manifest: {error}; prepare the data again, or remove the file") from None
