"""megatron/data/preparation/checks.py: no id of another tokenizer, none that the model does not know."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.index_format import write_index
from megatron.data.preparation import checks
from megatron.data.preparation.checks import bytes_to_read, check_data, check_manifest, check_token_ids
from megatron.data.preparation.manifest import DataManifest, FileRecord, TokenizerRecord, read_manifest
from megatron.data.tokenizer.null import NullTokenizer

TOKENIZER = NullTokenizer(99)


def write_data(prefix, ids, lengths, documents, dtype=np.uint16):
    np.array(ids, dtype).tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", dtype, np.array(lengths), np.array(documents))


@pytest.fixture
def prefix(tmp_path):
    """A data set with its manifest."""
    prefix = str(tmp_path / "x_text_document")
    write_data(prefix, [1, 2, 3, 99, 5, 99], [4, 2], [0, 1, 2])
    files = {
        s: FileRecord(Path(f"{prefix}.{s}").stat().st_size, checks.sha256_of_file(f"{prefix}.{s}"))
        for s in ("bin", "idx")
    }
    DataManifest(
        tokenizer=TokenizerRecord.of(TOKENIZER),
        key="text",
        level="document",
        append_eod=True,
        dtype="uint16",
        documents=2,
        sequences=2,
        tokens=6,
        documents_with_special_literals=0,
        special_literals_matched=True,
        lines=2,
        blank_lines=0,
        dropped_lines={},
        inputs=(),
        files=files,
    ).write(f"{prefix}.manifest.json")
    return prefix


def test_the_same_tokenizer_passes_in_silence(prefix):
    warnings = []
    assert check_data(prefix, NullTokenizer(99), 100, warnings.append) == read_manifest(prefix)
    assert warnings == []


def test_another_tokenizer_is_refused(prefix):
    other = NullTokenizer(99)
    other.type_name = "OtherTokenizer"
    with pytest.raises(
        UserError, match=r"x_text_document.manifest.json: made with a NullTokenizer of 100 ids \(digest "
    ):
        check_manifest(prefix, other, 100, print)
    with pytest.raises(UserError, match=r"made with the NullTokenizer of 100 ids, but the model has 99"):
        check_manifest(prefix, TOKENIZER, 99, print)


def test_a_null_tokenizer_may_stand_in(prefix):
    path = Path(f"{prefix}.manifest.json")
    content = json.loads(path.read_text())
    content["tokenizer"]["type"] = "GPT2BPETokenizer"
    path.write_text(json.dumps(content))
    warnings = []
    assert check_manifest(prefix, NullTokenizer(500), 501, warnings.append) is not None
    assert "NullTokenizer stands in for it" in warnings[0]


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_files_that_are_not_the_manifests(prefix, suffix):
    path = Path(f"{prefix}.{suffix}")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"x_text_document.{suffix}: not the file that .*: its content differs"):
        check_manifest(prefix, TOKENIZER, 100, print)
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=rf"{len(content) - 1} bytes, not {len(content)}"):
        check_manifest(prefix, TOKENIZER, 100, print)
    path.unlink()
    with pytest.raises(UserError, match=rf"x_text_document.{suffix}: missing"):
        check_manifest(prefix, TOKENIZER, 100, print)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1}', '{"version": 1, "tokenizer": {"x": 1}}'])
def test_a_broken_manifest_is_named(prefix, content):
    Path(f"{prefix}.manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest.json: not a manifest: .*prepare the data again"):
        check_manifest(prefix, TOKENIZER, 100, print)
    Path(f"{prefix}.manifest.json").write_text('{"version": 2}')
    with pytest.raises(UserError, match="made by another release"):
        check_manifest(prefix, TOKENIZER, 100, print)


def test_without_a_manifest_every_id_is_looked_at(prefix):
    Path(f"{prefix}.manifest.json").unlink()
    assert check_data(prefix, TOKENIZER, 100, print) is None
    with pytest.raises(
        UserError, match=r"x_text_document.bin: id 99 at document 0, offset 3, but the model has ids 0 to 98"
    ):
        check_data(prefix, TOKENIZER, 99, print)


def test_a_run_reads_large_files_in_part(prefix, monkeypatch):
    """A run must start within seconds, however much data it has."""
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[::-1])
    with pytest.raises(UserError, match="but the model has ids 0 to 99"):  # its size is that of the manifest
        check_data(prefix, TOKENIZER, 100, print, most_bytes=11)
    Path(f"{prefix}.manifest.json").unlink()
    monkeypatch.setattr(checks, "_SCANNED_IDS", 2)
    write_data(prefix, [*range(18), 500, 19, 20, 900], [22], [0, 1])
    check_data(prefix, TOKENIZER, 901, print, most_bytes=8)
    with pytest.raises(UserError, match="id 900 at document 0, offset 21"):  # the first two and the last two
        check_data(prefix, TOKENIZER, 100, print, most_bytes=8)
    with pytest.raises(UserError, match="id 500 at document 0, offset 18"):
        check_data(prefix, TOKENIZER, 100, print, most_bytes=44)
    assert bytes_to_read(3) == 256 * 2**20 and 1000 * bytes_to_read(1000) <= 2 * 2**30


@pytest.mark.parametrize("scanned", [1, 3, 1000])
def test_place_of_a_wrong_id(tmp_path, monkeypatch, scanned):
    monkeypatch.setattr(checks, "_SCANNED_IDS", scanned)
    prefix = str(tmp_path / "x")
    # Documents: two sequences; none; one; the wrong id is the third token of the last.
    lengths, documents = [2, 3, 4], [0, 2, 2, 3]
    write_data(prefix, [0, 1, 2, 3, 4, 5, 6, 700, 800], lengths, documents, np.int32)
    check_token_ids(prefix, 801)
    with pytest.raises(UserError, match="id 700 at document 2, offset 2"):
        check_token_ids(prefix, 700)
    write_data(prefix, [0, 1, 2, -3, 4, 5, 6, 7, 8], lengths, documents, np.int32)
    with pytest.raises(UserError, match="id -3 at document 0, offset 3"):
        check_token_ids(prefix, 700)
    write_data(prefix, [], [], [0, 0])
    check_token_ids(prefix, 700)


def test_a_file_that_was_cut_off(tmp_path):
    prefix = str(tmp_path / "x")
    write_data(prefix, [1, 2, 3], [3], [0, 1], np.int32)
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-1])
    with pytest.raises(UserError, match=r"x\.bin: 11 bytes, which is no whole number of int32 ids"):
        check_token_ids(prefix, 100)


def test_files_that_are_missing(prefix):
    shutil.move(f"{prefix}.bin", f"{prefix}.elsewhere")
    with pytest.raises(UserError, match=r"x_text_document.bin: no such file"):
        check_token_ids(prefix, 100)
    with pytest.raises(UserError, match=r"none.idx: no such index file"):
        check_token_ids(prefix.replace("x_text_document", "none"), 100)


def test_empty_space_is_not_data(tmp_path, monkeypatch):
    """Such files remain if a copy is interrupted after the file got its size."""
    prefix, warnings = str(tmp_path / "x"), []
    write_data(prefix, [0] * 5000, [5000], [0, 1])
    with pytest.raises(UserError, match=r"x\.bin: all ids that were read are 0, as after a copy that was interrupted"):
        check_token_ids(prefix, 100)
    write_data(prefix, [0] * 4000, [4000], [0, 1])
    check_token_ids(prefix, 100)  # a few zeros may be a test
    monkeypatch.setattr(checks, "_SCANNED_IDS", 5000)
    write_data(prefix, [1] * 5000 + [0] * 5000, [10000], [0, 1])
    check_token_ids(prefix, 100, warn=warnings.append)
    assert len(warnings) == 1 and "x.bin: 1 of 2 parts of the file that were read" in warnings[0]


def test_empty_space_in_place_of_a_large_file_with_a_manifest(prefix):
    size = Path(f"{prefix}.bin").stat().st_size
    monkeypatched = pytest.MonkeyPatch()
    with monkeypatched.context() as patch:
        patch.setattr(checks, "_FEWEST_ZEROS", 1)
        Path(f"{prefix}.bin").write_bytes(bytes(size))
        with pytest.raises(UserError, match="all ids that were read are 0"):
            check_data(prefix, TOKENIZER, 100, print, most_bytes=size - 1)
