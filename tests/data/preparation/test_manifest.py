"""The manifest of a data set: written, read again, and refused if it is not one."""

import json
from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.data.preparation.manifest import (
    DataManifest,
    FileRecord,
    TokenizerRecord,
    get_manifest_path,
    read_manifest,
)
from megatron.data.tokenizer.null import NullTokenizer

MANIFEST = DataManifest(
    tokenizer=TokenizerRecord.of(NullTokenizer(10)),
    key="text",
    level="document",
    append_eod=True,
    dtype="uint16",
    documents=2,
    sequences=3,
    tokens=9,
    documents_with_special_literals=1,
    special_literals_matched=False,
    lines=5,
    blank_lines=1,
    dropped_lines={"not JSON": 2},
    inputs=({"name": "ä.jsonl", "bytes": 7},),
    files={"bin": FileRecord(18, "00"), "idx": FileRecord(4, "ff")},
)


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    MANIFEST.write(get_manifest_path(prefix))
    assert read_manifest(prefix) == MANIFEST
    assert "ä.jsonl" in (tmp_path / "data.manifest.json").read_text("utf-8")


def test_the_record_of_a_tokenizer_identifies_it() -> None:
    tokenizer = NullTokenizer(10)
    assert TokenizerRecord.of(tokenizer) == TokenizerRecord("NullTokenizer", tokenizer.digest, 11, 10)


def test_without_a_file_there_is_no_manifest(tmp_path: Path) -> None:
    assert read_manifest(str(tmp_path / "data")) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"version": 1}', '{"version": 1, "tokenizer": {}}', "{}"])
def test_a_file_that_is_no_manifest_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "data.manifest.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"data\.manifest\.json: not a manifest"):
        read_manifest(str(tmp_path / "data"))


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_fields_must_be_those_of_a_manifest(tmp_path: Path, change: str) -> None:
    path = tmp_path / "data.manifest.json"
    MANIFEST.write(path)
    fields = json.loads(path.read_text())
    if change == "missing":
        del fields["tokens"]
    else:
        fields["more"] = 1
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="not a manifest"):
        read_manifest(str(tmp_path / "data"))


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.manifest.json"
    MANIFEST.write(path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(UserError, match=r"^[^:]*manifest\.json: made by another release"):
        read_manifest(str(tmp_path / "data"))
