"""megatron/data/preparation/text_files.py: a file is a document, or a separator divides it."""

import json

import pytest

from megatron.core.exceptions import UserError
from megatron.data.preparation import text_files
from megatron.data.preparation.text_files import TextReader


def documents(path, longest=1000, separator=None):
    with TextReader(str(path), ["text"], longest, separator) as reader:
        found = [line and json.loads(line)["text"] for line in reader.lines_of_group(0)]
        assert reader.bytes_read == path.stat().st_size
    return found


@pytest.mark.parametrize("chunk", [1, 2, 5, 1 << 20])
def test_documents(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text_files, "_CHUNK", chunk)
    path = tmp_path / "a.txt"
    path.write_bytes("é one\r\n<|end|>two<|end|>\n<|end|><|end|>a longer one<|end|>three\n".encode())
    assert documents(path, separator="<|end|>") == ["é one\r\n", "two", "a longer one", "three\n"]
    assert documents(path, 9, "<|end|>") == ["é one\r\n", "two", None, "three\n"]
    assert documents(path) == [path.read_bytes().decode()]
    assert documents(path, 9) == [None]
    path.write_bytes(b" \n")
    assert documents(path) == []


def test_other_encodings_are_named(tmp_path):
    (tmp_path / "a.md").write_bytes(b"good<s>b\xffd")
    with pytest.raises(UserError, match=r"a.md: not UTF-8: byte 0xff of document 2"):
        documents(tmp_path / "a.md", separator="<s>")
