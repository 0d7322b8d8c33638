"""Reading any program's safetensors files, and what is said about files that are none."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint
from megatron.core.dist_checkpointing.safetensors_file import read_header, read_tensor


def test_every_type_and_shape(tmp_path):
    wrote = {
        "a": torch.randn(3, 4),
        "b": torch.randn(2, 3, 5).bfloat16(),
        "c": torch.tensor(7, dtype=torch.int64),
        "d": torch.randn(6, dtype=torch.float64),
        "e": torch.empty(0, 3),
        "f": torch.tensor([True, False, True]),  # after it, tensors lie at odd bytes
    }
    save_file(wrote, tmp_path / "x.safetensors", {"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert found.keys() == wrote.keys()
    for name, tensor in wrote.items():
        read = read_tensor(found[name])
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert torch.equal(read, tensor)


def file_of(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


WRONG = {
    "not JSON": (b"{nothing", b""),
    "gives not the length": None,
    "type F4": ({"w": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}, b"x"),
    "w ends at byte": ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
    r"w of shape \[3\]": ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"),
    "v ends at byte .*, but w begins at byte .*: they overlap": (
        {name: {"dtype": "F32", "shape": [2], "data_offsets": at} for name, at in (("w", [4, 12]), ("v", [0, 8]))},
        b"123456789abc",
    ),
    "KeyError": ({"w": {"dtype": "F32", "shape": [3]}}, b""),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_is_named(said, tmp_path):
    path, content = tmp_path / "x.safetensors", WRONG[said]
    if content is None:
        path.write_bytes(b"PK\x03\x04 this is a zip archive of pickles")
        said = "not the length"
    else:
        file_of(path, *content)
    with pytest.raises(BrokenCheckpoint, match=said) as raised:
        read_header(path)
    assert raised.value.path == path and "BrokenCheckpoint" not in str(raised.value)


def test_a_file_that_was_cut_after_it_was_opened(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.randn(100)}, path)
    place = read_header(path)["w"]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(BrokenCheckpoint, match="40 bytes are missing"):
        read_tensor(place)
