"""megatron/data/preparation/dataset_merging.py and tools/merge_datasets.py: the same as one preparation."""

import importlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatron.core.exceptions import UserError
from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data.preparation.config import PreparationConfig
from megatron.data.preparation.dataset_merging import find_prefixes, merge_datasets
from megatron.data.preparation.manifest import read_manifest
from megatron.data.preparation.prepare import prepare
from megatron.data.tokenizer.null import NullTokenizer


def prepare_lines(folder, name, lines, size=50):
    (folder / "input").mkdir(exist_ok=True)
    (folder / "input" / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    config = PreparationConfig(
        input=[str(folder / "input" / f"{name}.jsonl")], output_prefix=str(folder / "parts" / name), workers=1
    )
    prepare(config, NullTokenizer(size), Console(file=io.StringIO()), lambda _: None)


@pytest.fixture
def parts(tmp_path):
    prepare_lines(tmp_path, "b", ["4 5", "6"])
    prepare_lines(tmp_path, "a", ["1 2 3", ""])
    return tmp_path / "parts"


def test_the_result_is_that_of_one_preparation(tmp_path, parts, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    tool = importlib.import_module("merge_datasets")
    assert tool.main(["--input", str(parts), "--output-prefix", str(tmp_path / "all")]) == 0
    assert "all: 2 data sets, 4 documents, 3 sequences, 6 tokens (uint16)" in capsys.readouterr().out
    prepare_lines(tmp_path, "whole", ["1 2 3", "", "4 5", "6"])
    for suffix in ("bin", "idx"):
        expected = (parts / f"whole_text_document.{suffix}").read_bytes()
        assert (tmp_path / f"all.{suffix}").read_bytes() == expected
    manifest, whole = (read_manifest(str(prefix)) for prefix in (tmp_path / "all", parts / "whole_text_document"))
    assert manifest.files == whole.files and manifest.tokens == 6 and manifest.documents == 4
    assert [file["name"] for file in manifest.inputs] == ["a.jsonl", "b.jsonl"]
    assert tool.main(["--input", str(tmp_path / "none"), "--output-prefix", "x"]) == 2


def test_without_a_manifest_there_is_none(tmp_path, parts):
    (parts / "a_text_document.manifest.json").unlink()
    warnings: list[str] = []
    assert merge_datasets(find_prefixes(str(parts)), str(tmp_path / "all"), warnings.append) is None
    assert "without a manifest" in warnings[0] and not (tmp_path / "all.manifest.json").exists()


def test_a_replaced_data_set_and_one_beside_its_inputs_are_warned_of(tmp_path, parts):
    prefixes = find_prefixes(str(parts))
    warnings: list[str] = []
    merge_datasets(prefixes, str(tmp_path / "all"), warnings.append)
    assert not warnings
    merge_datasets(prefixes, str(tmp_path / "all"), warnings.append)
    assert warnings == [f"{tmp_path / 'all'}.{suffix}: exists and will be replaced" for suffix in ("bin", "idx")]
    merge_datasets(prefixes, str(parts / "all"), warnings.append)
    assert len(warnings) == 3 and "counts these documents twice" in warnings[2]


def test_other_tokenizers_and_damage_are_refused(tmp_path, parts):
    prepare_lines(tmp_path, "c", ["1"], size=60)
    with pytest.raises(UserError, match=r"c_text_document and .*a_text_document differ in tokenizer"):
        merge_datasets(find_prefixes(str(parts)), str(tmp_path / "all"), print)
    for path in parts.glob("c_*"):
        path.unlink()
    path = parts / "b_text_document.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"b_text_document.bin: not the file that .*: its content differs"):
        merge_datasets(find_prefixes(str(parts)), str(tmp_path / "all"), print)
    assert not list(tmp_path.glob("all*"))


def test_types_differ_without_manifests(tmp_path):
    for name, dtype in (("a", np.uint16), ("b", np.int32)):
        with IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype) as builder:
            builder.add_document(np.array([1, 2]), [2])
            builder.finalize(str(tmp_path / f"{name}.idx"))
    with pytest.raises(UserError, match=r"b: contains int32, but the output is uint16"):
        merge_datasets(find_prefixes(str(tmp_path)), str(tmp_path / "all"), print)
    with pytest.raises(UserError, match=r"one of the inputs"):
        merge_datasets(find_prefixes(str(tmp_path)), str(tmp_path / "a"), print)
    (tmp_path / "b.idx").unlink()
    with pytest.raises(UserError, match=r"--input .*: b.bin has no b.idx beside it"):
        find_prefixes(str(tmp_path))


def test_inputs_are_never_written_over(tmp_path, parts, monkeypatch):
    (tmp_path / "link").symlink_to(parts, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in parts.iterdir()}
    for output in ("./parts/a_text_document", str(parts / "a_text_document"), "link/a_text_document"):
        with pytest.raises(UserError, match=r"--output-prefix .*a_text_document: one of the inputs"):
            merge_datasets(find_prefixes("parts"), output, print)
    assert {path.name: path.read_bytes() for path in parts.iterdir()} == before


def test_empty_paths_are_refused(tmp_path, parts, monkeypatch):
    monkeypatch.chdir(parts)
    for output in ("", "whole/"):
        with pytest.raises(UserError, match=f'--output-prefix "{output}": no name of a data set'):
            merge_datasets(find_prefixes("."), output, print)
    with pytest.raises(UserError, match='--input "" is an empty path'):
        find_prefixes("")
    assert not list(parts.glob(".*"))


def test_an_interrupt_leaves_no_data_set(tmp_path, parts, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    monkeypatch.setattr(IndexedDatasetBuilder, "add_index", interrupt)
    tool = importlib.import_module("merge_datasets")
    assert tool.main(["--input", str(parts), "--output-prefix", str(tmp_path / "all")]) == 130
    assert "interrupted; no data set was written" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if "all" in path.name]
