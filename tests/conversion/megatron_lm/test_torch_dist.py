"""Folders of torch.distributed.checkpoint, read without torch's unpickler and compared with torch's own reader."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron.conversion.megatron_lm.torch_dist import DistFolder, DistTensor, _FileRange
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "torch_dist"
"""Two checkpoints that Megatron-LM 0.16.1 wrote after one step of Adam."""


def read_by_torch(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, as torch's reader returns them."""
    reader = dcp.FileSystemReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata.items()
    tensors = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries if hasattr(e, "size")}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.parametrize("name", ["gpt2style_optim", "llamastyle_distopt_fully_reshardable"])
def test_golden_checkpoints(name: str) -> None:
    folder = GOLDEN / name / "iter_0000001"
    ours, theirs = DistFolder(folder), read_by_torch(folder)
    assert ours.tensors.keys() == theirs.keys() and len(theirs) > 30
    for key, tensor in theirs.items():
        assert ours.tensors[key].read(Box.whole(tuple(tensor.shape))).equal(tensor.view(-1)), key
    assert ours.common["iteration"] == 1 and ours.common["checkpoint_version"] == 3.0
    assert sorted(ours.objects)[0] == "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
    assert ours.object(sorted(ours.objects)[0]) == [None]


def test_boxes_across_stored_boxes() -> None:
    folder = GOLDEN / "llamastyle_distopt_fully_reshardable" / "iter_0000001"
    key = "decoder.layers.mlp.linear_fc1.weight"  # stored in four: two layers, gate and up
    whole = read_by_torch(folder)[key]
    values = DistFolder(folder).tensors[key].read(Box((0, 170, 3), (2, 12, 5)))
    assert values.equal(whole[0:2, 170:182, 3:8].reshape(-1))


def copied(tmp_path: Path, change: Any) -> Path:
    """A copy of a golden folder whose metadata `change` has changed."""
    folder = tmp_path / "iter_0000001"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(GOLDEN / "gpt2style_optim" / "iter_0000001", folder)
    metadata = dcp.FileSystemReader(str(folder)).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch hostile-metadata-ran",)


def test_hostile_metadata(tmp_path: Path) -> None:
    name = "decoder.final_layernorm.weight"

    def info(metadata: Any) -> Any:
        return next(value for index, value in metadata.storage_data.items() if index.fqn == name)

    def set_(thing: Any, **values: Any) -> None:
        for key, value in values.items():
            object.__setattr__(thing, key, value)

    for change, message in (
        (lambda m: set_(info(m), relative_path="../../etc/passwd"), "is not the name of a file in this folder"),
        (lambda m: set_(info(m), relative_path="/etc/passwd"), "is not the name of a file in this folder"),
        (lambda m: set_(info(m), relative_path=".."), "is not the name of a file in this folder"),
        (lambda m: set_(info(m), offset=-5), "are no sizes"),
        (lambda m: set_(info(m), transform_descriptors=["zstd"]), "is transformed"),
        (lambda m: set_(m.state_dict_metadata[name], size=torch.Size([1 << 50])), "not all of it"),
        (lambda m: set_(m.state_dict_metadata[name].chunks[0], sizes=torch.Size([65])), "is outside of it"),
        (lambda m: m.state_dict_metadata[name].chunks.append(m.state_dict_metadata[name].chunks[0]), ""),
        (lambda m: m.state_dict_metadata.update({3: m.state_dict_metadata[name]}), "the name of a tensor is a int"),
        (
            lambda m: set_(m.state_dict_metadata[name].properties, dtype=torch.complex128),
            "a tensor of type torch.complex1",
        ),
        (lambda m: set_(m.state_dict_metadata[name].properties, dtype=3), "a tensor of type 3"),
        (lambda m: m.storage_data.clear(), "not the metadata of torch.distributed.checkpoint"),
        (lambda m: set_(m, planner_data=Runs()), "it names posix.system"),
        (lambda m: set_(m, state_dict_metadata=None), "not the metadata of torch.distributed.checkpoint"),
    ):
        folder = copied(tmp_path, change)
        if message:
            with pytest.raises(UserError, match=message):
                DistFolder(folder)
        else:
            DistFolder(folder)
    assert not Path("hostile-metadata-ran").exists()


def test_stored_boxes_that_overlap(tmp_path: Path) -> None:
    """Together they have as many elements as the tensor, but the last element is nowhere."""
    boxes = {}
    for name, start, values in (("a", 0, torch.ones(3)), ("b", 2, torch.ones(1))):
        torch.save(values, tmp_path / name)
        boxes[Box((start,), tuple(values.shape))] = _FileRange(name, 0, (tmp_path / name).stat().st_size)
    tensor = DistTensor("t", (4,), torch.float32, boxes, tmp_path)
    with pytest.raises(UserError, match="3 of 4 elements of t are stored"):
        tensor.read(Box.whole((4,)))
    assert tensor.read(Box((0,), (2,))).tolist() == [1.0, 1.0]


def test_bytes_of_another_tensor_and_a_missing_file(tmp_path: Path) -> None:
    def exchange(metadata: Any) -> None:
        """Points at a bias for a weight of another shape."""
        wanted = {index.fqn: index for index in metadata.storage_data if "embedding." in index.fqn[:10]}
        first, second = wanted["embedding.word_embeddings.weight"], wanted["embedding.position_embeddings.weight"]
        metadata.storage_data[first] = metadata.storage_data[second]

    folder = DistFolder(copied(tmp_path, exchange))
    with pytest.raises(UserError, match=r"there is no torch.float32 tensor embedding.word_embeddings.weight of shape"):
        folder.tensors["embedding.word_embeddings.weight"].read(Box.whole((128, 64)))
    for file in folder.path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(UserError, match=r"distcp: No such file"):
        folder.tensors["decoder.final_layernorm.weight"].read(Box.whole((64,)))
    (folder.path / ".metadata").unlink()
    with pytest.raises(UserError, match=r".metadata: No such file"):
        DistFolder(folder.path)
