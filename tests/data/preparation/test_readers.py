"""megatron/data/preparation/readers.py: text, Arrow and Parquet give the same documents as JSON lines."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from megatron.core.exceptions import UserError
from megatron.data.preparation.config import PreparationConfig
from megatron.data.preparation.inputs import find_inputs
from megatron.data.preparation.prepare import prepare
from megatron.data.preparation.readers import open_groups, resolve_keys, string_columns
from megatron.data.tokenizer.null import NullTokenizer

TEXTS = ["1 2 3", "4", "5 6"]


def write_input(folder, kind):
    folder.mkdir()
    table = pyarrow.table({"text": TEXTS, "n": [1, 2, 3]})
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        (folder / "README.md").write_text("7")
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, folder / "a.parquet")
    elif kind == "arrow":  # as Dataset.save_to_disk writes it
        with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
        (folder / "dataset_info.json").write_text("{}")
    elif kind == "txt":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.{'md' if number else 'txt'}").write_text(text)
    else:
        (folder / "a.txt").write_text("|".join(TEXTS))


@pytest.mark.parametrize("workers", [1, 2])
def test_any_kind_gives_the_same_data_set(tmp_path, workers):
    found = set()
    for kind in ("jsonl", "parquet", "arrow", "txt", "separated"):
        write_input(tmp_path / kind, kind)
        config = PreparationConfig(
            input=[str(tmp_path / kind)],
            output_prefix=str(tmp_path / f"out_{kind}"),
            document_separator="|" if kind == "separated" else None,
            workers=workers,
        )
        (manifest,) = prepare(config, NullTokenizer(50), Console(quiet=True), lambda line: None).manifests
        found.add((manifest.documents, (tmp_path / f"out_{kind}_text_document.bin").read_bytes()))
    assert found == {(3, np.arange(1, 7, dtype=np.uint16).tobytes())}


def test_columns_of_texts(tmp_path):
    for kind in ("parquet", "arrow"):
        write_input(tmp_path / kind, kind)
        (file,) = find_inputs([str(tmp_path / kind)])
        assert string_columns(file) == (["text", "n"], ["text"])
        with open_groups(file, ["text"], 100, all_columns=True) as reader:
            assert next(reader.lines_of_group(0)) == b'{"text": "1 2 3", "n": 1}'


def test_a_folder_of_metadata_has_no_input(tmp_path):
    write_input(tmp_path / "a", "arrow")
    (tmp_path / "a/data-00000-of-00001.arrow").write_bytes(b"")
    with pytest.raises(UserError, match=r"\.arrow: damaged, or no Arrow file"):
        find_inputs([str(tmp_path / "a")])
    (tmp_path / "b").mkdir()
    (tmp_path / "b/dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(UserError, match="a folder without input files"):
        find_inputs([str(tmp_path / "b")])


def test_json_lines_under_the_name_of_a_text_are_told(tmp_path):
    (tmp_path / "a.txt").write_text('{"text": "1"}\n')
    warnings: list[str] = []
    assert find_inputs([str(tmp_path / "a.txt")], warnings.append)[0].kind == "text"
    assert "read as text, by its name; if it contains JSON lines, rename it to .jsonl" in warnings[0]


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        ({"content": "x", "id": 3}, ["content"]),
        ({"content": "x", "url": "y"}, ["text"]),
        ({"content": "x", "text": None}, ["text"]),
        ({"body": "x"}, ["text"]),
    ],
)
def test_the_only_column_of_texts(tmp_path, record, keys):
    line = json.dumps(record).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(b"\n" + line)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(line))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        warnings: list[str] = []
        files = find_inputs([str(tmp_path / name)])
        assert resolve_keys(["text"], files, warnings.append) == keys
        assert len(warnings) == (keys == ["content"])
        assert resolve_keys(["body"], files, warnings.append) == ["body"]


@pytest.mark.parametrize("content", [b"", b"no json\n", b"[1]\n"])
def test_other_lines_are_left_to_their_reader(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert resolve_keys(["text"], find_inputs([str(tmp_path)]), print) == ["text"]
