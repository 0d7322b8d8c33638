"""Folders of Hugging Face models: what is missing, invalid or refused is named by its file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.conversion.model_folder import index_of, open_folder, read_config
from megatron.core.exceptions import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 2}')
    save_file({"w": torch.ones(2), "v": torch.zeros(1, 3)}, tmp_path / "model.safetensors")
    return tmp_path


def refused(folder: Path, said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_folder(folder)


def test_config_and_places_of_tensors(folder: Path) -> None:
    opened = open_folder(folder)
    assert opened.config == {"hidden_size": 2}
    assert {name: place.shape for name, place in opened.tensors.items()} == {"w": (2,), "v": (1, 3)}


def test_config_json_is_missing_or_invalid(folder: Path) -> None:
    for content, said in (("[]", "config.json is not a JSON object"), ("{", "config.json is not JSON: ")):
        (folder / "config.json").write_text(content)
        refused(folder, said)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config.json; a model's folder has it beside model.safetensors or"):
        read_config(folder)


def test_an_index_of_several_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"u": torch.ones(2), "w": torch.ones(5)}, folder / "b.safetensors")
    files = {"w": "a.safetensors", "v": "a.safetensors", "u": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_bytes(index_of(files, 28))
    opened = open_folder(folder)
    assert {name: place.path.name for name, place in opened.tensors.items()} == files
    assert opened.tensors["w"].shape == (2,), "b has a tensor of that name too, which the index does not name"


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (
            {"w": "../x.safetensors"},
            "index.json: weight_map names '../x.safetensors', which is not a file in this folder",
        ),
        ({"x": "model.safetensors"}, "weight_map places x in model.safetensors, which does not have it"),
        (
            {"w": "model.safetensors", "u": "b.safetensors", "v": "c.safetensors"},
            "index.json: weight_map names b.safetensors, and 1 more files, missing in the folder: copy it again",
        ),
        ({"w": 3}, "index.json: weight_map must be an object of file names"),
        (None, "index.json: weight_map must be an object of file names"),
    ],
)
def test_an_invalid_index(folder: Path, index: object, said: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    refused(folder, said)


def test_missing_and_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "has neither model.safetensors nor model.safetensors.index.json")
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    refused(folder, "pytorch_model.bin: pickled weights are refused, because reading them can run code")


@pytest.mark.parametrize("length", [0, 7, 20])
def test_a_file_that_is_cut_off_in_its_header(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    refused(folder, rf"model.safetensors: cut off: it has {length} bytes, which is less than its header$")


def test_tensors_that_overlap_in_their_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": offsets}
        for name, offsets in (("a", [0, 8]), ("b", [4, 12]))
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    begin = 8 + len(text)
    refused(folder, f"model.safetensors: a ends at byte {begin + 8}, but b begins at byte {begin + 4}: they overlap")
