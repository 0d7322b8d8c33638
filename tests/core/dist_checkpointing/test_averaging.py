"""Averages of checkpoints: shares, types, and models that differ."""

from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.averaging import ema_shares, save_average
from megatron.core.dist_checkpointing.checkpoint import Checkpoint, open_checkpoint
from megatron.core.dist_checkpointing.chunk import MASTER, Chunk, optimizer_state_name
from megatron.core.dist_checkpointing.planning import match
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.dist_checkpointing.writing import save
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box


def chunk(name: str, tensor: torch.Tensor) -> Chunk:
    shape = tuple(tensor.shape)
    return Chunk(name, shape, Box.whole(shape), None, tensor)


def saved(root: Path, step: int, **tensors: torch.Tensor) -> Checkpoint:
    chunks = [chunk(name.replace("master_", optimizer_state_name(MASTER, "")), each) for name, each in tensors.items()]
    return open_checkpoint(save(root, chunks, step=step, common={}, config={"seed": step}, layout={}).folder)


def test_shares_of_a_moving_average_are_those_of_its_recursion() -> None:
    average = [1.0, 0.0, 0.0]
    for number in (1, 2):
        average = [0.75 * share + 0.25 * (place == number) for place, share in enumerate(average)]
    assert ema_shares(3, 0.75) == pytest.approx(average)


def test_main_weights_are_averaged_where_there_are_any(tmp_path: Path) -> None:
    exact = [torch.tensor([1.0 + 2.0**-9, 3.0]), torch.tensor([1.0 + 2.0**-9, 5.0])]
    parts = [
        saved(tmp_path, step, w=each.bfloat16(), master_w=each, count=torch.tensor([step]), norm=each)
        for step, each in enumerate(exact, 1)
    ]
    folder = save_average(parts, [0.5, 0.5], tmp_path / "mean", {}).folder
    found = {name: torch.empty(2, dtype=dtype) for name, dtype in (("w", torch.bfloat16), ("norm", torch.float32))}
    found["count"] = torch.empty(1, dtype=torch.int64)
    mean = open_checkpoint(folder)
    assert mean.catalogue.keys() == found.keys() and mean.manifest.config == {"seed": 2}
    fill_tensors(mean, match([chunk(name, tensor) for name, tensor in found.items()], mean.catalogue))
    assert torch.equal(found["norm"], torch.tensor([1.0 + 2.0**-9, 4.0]))
    assert torch.equal(found["w"], torch.tensor([1.0 + 2.0**-9, 4.0]).bfloat16())
    assert found["count"].tolist() == [2]


def test_other_models_are_refused(tmp_path: Path) -> None:
    parts = [saved(tmp_path, 1, w=torch.ones(2)), saved(tmp_path, 2, w=torch.ones(3))]
    with pytest.raises(UserError, match=r"have different models: w has shape \[2\] and \[3\]"):
        save_average(parts, [0.5, 0.5], tmp_path / "mean", {})
    assert not (tmp_path / "mean").exists()
