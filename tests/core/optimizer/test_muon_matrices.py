"""Which parameters Muon updates, and how fused projections are cut into matrices."""

import pytest
import torch
from torch import nn

from megatron.core.exceptions import UserError
from megatron.core.initializers import Normal
from megatron.core.optimizer.muon_matrices import matrices_of, takes_muon
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parameters import Box, ParameterInfo


def config(**settings: object) -> OptimizerConfig:
    return OptimizerConfig(optimizer="muon", **settings)  # type: ignore[arg-type]


def info(
    shape: tuple[int, ...], start: tuple[int, ...] = (), part: tuple[int, ...] = (), **more: object
) -> ParameterInfo:
    box = Box(start or (0,) * len(shape), part or shape)
    return ParameterInfo(shape, box, Normal(1.0), name="layer.weight", **more)  # type: ignore[arg-type]


def test_matrices_inside_layers_are_taken() -> None:
    matrix, vector = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4))
    assert takes_muon(matrix, info((4, 6)), config())
    assert not takes_muon(matrix, info((4, 6)), OptimizerConfig(optimizer="adam"))
    assert not takes_muon(matrix, info((4, 6), embedding_or_output=True), config())
    assert not takes_muon(matrix, info((4, 6), is_table=True), config())
    assert not takes_muon(matrix, info((4, 6), is_depthwise=True), config())
    assert not takes_muon(vector, info((4,)), config())
    assert takes_muon(nn.Parameter(torch.ones(2, 4, 6)), info((2, 4, 6), grid="expert"), config())


def test_queries_keys_and_values_are_matrices_of_their_own() -> None:
    fused = info((2, 4, 3, 8), separate_heads=(2, 1, 1))  # 2 groups of 2 queries, a key and a value, each 3 wide
    found = list(matrices_of(fused, 1, config()))
    assert [(one.shape, one.whole, one.split, one.heads) for one in found] == [
        ((1, 12, 8), (12, 8), None, slice(0, 2)),
        ((1, 6, 8), (6, 8), None, slice(2, 3)),
        ((1, 6, 8), (6, 8), None, slice(3, 4)),
    ]
    flat = torch.arange(2 * 4 * 3 * 8.0)
    rows = flat.view(2, 4, 3, 8)[:, 2].reshape(1, 6, 8)
    assert torch.equal(found[1].read(flat, fused), rows)
    found[1].write(flat, fused, rows + 1000)
    assert int((flat >= 1000).sum()) == rows.numel() and torch.equal(found[1].read(flat, fused), rows + 1000)
    for one in found:
        runs = one.runs(fused)
        at = runs.first + runs.stride * torch.arange(runs.count)[:, None] + torch.arange(runs.length)
        assert torch.equal(flat[at].view(one.shape), one.read(flat, fused))
    (whole,) = matrices_of(fused, 1, config(muon_split_qkv=False))
    assert (whole.shape, whole.heads) == ((1, 24, 8), None)


@pytest.mark.parametrize(("start", "part", "split"), [((2, 0), (2, 6), 1), ((0, 3), (4, 3), 2), ((0, 0), (4, 6), None)])
def test_the_dimension_that_ranks_divide(start: tuple[int, int], part: tuple[int, int], split: int | None) -> None:
    (found,) = matrices_of(info((4, 6), start, part), 2, config())
    assert (found.shape, found.whole, found.split) == ((1, *part), (4, 6), split)


def test_experts_are_as_many_matrices() -> None:
    (found,) = matrices_of(info((8, 4, 6), (4, 0, 0), (4, 4, 6), grid="expert"), 1, config())
    assert (found.shape, found.whole, found.split) == ((4, 4, 6), (4, 6), None)


def test_a_box_that_is_no_even_part_is_refused() -> None:
    shared = info((1, 4, 3, 8), (0, 0, 0, 0), (1, 3, 3, 8), separate_heads=(2, 1, 1))
    with pytest.raises(UserError, match="leave out --muon-no-split-qkv, or use blockwise"):
        list(matrices_of(shared, 2, config(muon_split_qkv=False, muon_tp_mode="distributed")))
    (found,) = matrices_of(shared, 2, config(muon_split_qkv=False, muon_tp_mode="blockwise"))
    assert found.split == 1
