"""megatron/data/preparation/compression.py: kinds by the first bytes; a missing package is named."""

import io
import sys

import pytest
import zstandard

from megatron.core.exceptions import UserError
from megatron.data.preparation.compression import kind_of, open_plain


def test_kinds():
    starts = {
        b"{": "plain",
        b"\x1f\x8b\x08": "gzip",
        b"\x28\xb5\x2f\xfd": "zstd",
        b"\xfd7zXZ\x00": "xz",
        b"PAR1": "parquet",
        b"": "plain",
    }
    assert {start: kind_of("x", start) for start in starts} == starts
    with pytest.raises(UserError, match=r"--input x: compressed with bzip2; what works is plain text, gzip, xz, zstd"):
        kind_of("x", b"BZh9")


def test_zstd_frames_follow_each_other(tmp_path):
    parts = [b"a" * 3_000_000, b"", b"b" * 70_000]
    (tmp_path / "x.zst").write_bytes(b"".join(map(zstandard.compress, parts)))
    with io.FileIO(tmp_path / "x.zst") as raw:
        assert open_plain(raw, "x.zst", "zstd").read() == b"".join(parts)


def test_without_the_package_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "x.zst").write_bytes(zstandard.compress(b"x"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with (
        io.FileIO(tmp_path / "x.zst") as raw,
        pytest.raises(UserError, match=r"--input x.zst: .*pip install zstandard"),
    ):
        open_plain(raw, "x.zst", "zstd")
