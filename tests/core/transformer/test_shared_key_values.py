"""The QKV projection with fewer query groups than ranks, rank by rank in one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config
from torch import Tensor

from megatron.core.backends import LOCAL
from megatron.core.communication.collectives import PlannedGroup
from megatron.core.parameters import info_of
from megatron.core.transformer.shared_key_values import SharedKeyValueLinear

RANKS, GROUPS, HEADS, WIDTH = 4, 2, 4, 3  # 8 heads of width 3 in 2 groups; two ranks share a group


def layers(**settings: Any) -> Iterator[SharedKeyValueLinear]:
    config = tiny_config(
        hidden_size=5,
        num_attention_heads=GROUPS * HEADS,
        num_query_groups=GROUPS,
        kv_channels=WIDTH,
        tensor_model_parallel_size=RANKS,
        **settings,
    )
    for rank in range(RANKS):
        yield SharedKeyValueLinear(config, True, PlannedGroup(tuple(range(RANKS)), rank), LOCAL)


def whole(gate: bool) -> tuple[Tensor, Tensor]:
    """Canonical weight [groups, rows of a group, d, h] and bias."""
    generator = torch.Generator().manual_seed(1)
    rows = HEADS * (2 if gate else 1) + 2
    shape = (GROUPS, rows, WIDTH)
    return (torch.randn(*size, dtype=torch.float64, generator=generator) for size in ((*shape, 5), shape))  # type: ignore[return-value]


@pytest.mark.parametrize("gate", [False, True])
@torch.no_grad()
def test_each_rank_computes_its_heads_and_their_keys(gate: bool) -> None:
    weight, bias = whole(gate)
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    everything = torch.einsum("th,grdh->tgrd", x, weight) + bias  # [t, groups, rows, d]
    for rank, layer in enumerate(layers(attention_output_gate=gate)):
        for parameter in layer.parameters():
            box = info_of(parameter).box
            source = weight if len(box.shape) == 4 else bias
            cut = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
            parameter.copy_(source[cut].reshape(parameter.shape))
        group, first = rank // 2, rank % 2 * 2
        rows = [first, first + 1, *([HEADS + first, HEADS + first + 1] if gate else []), -2, -1]
        output, none = layer(x)
        assert none is None
        torch.testing.assert_close(output, everything[:, group, rows].flatten(1))


@pytest.mark.parametrize("gate", [False, True])
def test_boxes_cover_the_canonical_tensors(gate: bool) -> None:
    """Query heads and gates are held once, keys and values by every rank, which sums their gradients."""
    weight, _ = whole(gate)
    holders = torch.zeros(weight.shape, dtype=torch.int64)
    partial = set()
    for layer in layers(attention_output_gate=gate):
        for name, parameter in layer.named_parameters():
            info = info_of(parameter)
            if "bias" not in name:
                cut = tuple(slice(a, a + n) for a, n in zip(info.box.start, info.box.shape, strict=True))
                holders[cut] += 1
            if info.partial_gradient_axes:
                partial.add(name)
    assert (holders[:, :-2] == 1).all() and (holders[:, -2:] == RANKS).all()
    assert partial == {"key_value_weight", "key_value_bias"}
