"""Entries of a state dict of Megatron-LM become parts of our tensors, and these become whole."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.conversion.megatron_lm.names import Found, SourceTensor
from megatron.conversion.megatron_lm.state_dict import StoredPart, add_parts, fit_state_dict
from megatron.conversion.model import RankTensor
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

FC2 = "decoder.layers.0.mlp.experts.linear_fc2.weight"
PLACE = Path("folder")


class Stored:
    def __init__(self, values: Tensor) -> None:
        self.values, self.shape, self.dtype = values, tuple(values.shape), values.dtype

    def read(self) -> Tensor:
        return self.values.flatten()


def test_experts_by_each_of_their_names() -> None:
    values = torch.arange(24.0).view(2, 3, 4)
    tensor = RankTensor(FC2, FC2, (2, 3, 4), Box.whole((2, 3, 4)))
    head = "decoder.layers.0.mlp.experts"
    for names in (
        [f"{head}.local_experts.{number}.linear_fc2.weight" for number in range(2)],
        [f"{head}.linear_fc2.weight{number}" for number in range(2)],
        [f"{head}.experts.linear_fc2.weight"],
    ):
        state = dict(zip(names, map(Stored, values if len(names) > 1 else [values]), strict=True))
        (one,) = fit_state_dict([tensor], state, 0, PLACE)
        assert one.names == names and one.values.read().equal(values.flatten())
    own = RankTensor(f"{head}.local_experts.1.linear_fc2.weight", FC2, (2, 3, 4), Box((1, 0, 0), (1, 3, 4)))
    (one,) = fit_state_dict([own], {f"{head}.linear_fc2.weight1": Stored(values[1])}, 0, PLACE)
    assert one.values.read().equal(values[1].flatten())  # our modules of one expert each, their module of all
    with pytest.raises(UserError, match=r"folder: .*linear_fc2.weight has shape \[2, 3, 4\] on this rank by the flags"):
        list(fit_state_dict([tensor], {names[0]: Stored(values.mT.contiguous())}, 0, PLACE))


def test_parts_become_whole() -> None:
    whole = torch.arange(12.0).view(4, 3)

    def part(begin: int, end: int, padding: int = 0) -> tuple[str, StoredPart]:
        rows = torch.cat([whole[begin:end].flatten(), torch.zeros(3 * padding)])
        return "w", StoredPart(Box((begin, 0), (end - begin, 3)), SourceTensor(rows.dtype, rows.clone))

    found = Found()
    add_parts(found, [part(2, 4, padding=2), part(0, 2), part(0, 2)], {"w": (4, 3)}, PLACE)
    assert found.tensors["w"].read().equal(whole.flatten())
    with pytest.raises(UserError, match="folder: its files hold 6 elements of w, which has shape"):
        add_parts(found, [part(0, 2)], {"w": (4, 3)}, PLACE)
    with pytest.raises(UserError, match="folder has no v, which the flags of the model need"):
        add_parts(found, [part(0, 4)], {"w": (4, 3), "v": (1,)}, PLACE)
