"""Quantisation of flat parts of weights: layers that read a gathered weight."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.grouped_linear import Fp8GroupedLinear
from megatron.core.ops.fp8.linear import Fp8Linear, QuantizedWeights
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit, Role
from megatron.core.ops.fp8.weight_blocks import cast_blocks, largest_of_blocks

E4M3 = torch.float8_e4m3fn


class Gathered:
    """A weight that was quantised in two parts, from main weights in float32."""

    def __init__(self, layer: QuantizedWeights, main: Tensor) -> None:
        self.number, blocks, flat = 1, layer.weight_blocks(), main.flatten()
        cut = flat.numel() * 5 // 9 // 64 * 64
        largest = torch.zeros(blocks.number)
        for start, part in ((0, flat[:cut]), (cut, flat[cut:])):
            largest_of_blocks(part, start, blocks, torch.bfloat16, largest)
        self.scales = layer.scaling.weight_scales(largest.view(blocks.shape))
        scales = self.scales.flatten() if self.scales.dim() else self.scales
        self.codes = torch.empty(flat.numel(), dtype=torch.uint8).view(E4M3)
        for start, part in ((0, flat[:cut]), (cut, flat[cut:])):
            out = self.codes[start : start + part.numel()]
            cast_blocks(part, start, blocks, torch.bfloat16, scales, out)
        self.codes = self.codes.view(main.shape)

    def gathered(self) -> tuple[int, Tensor, Tensor]:
        return self.number, self.codes, self.scales


def made(recipe: str, shape: tuple[int, ...], seed: int = 1) -> tuple[Any, nn.Parameter, Tensor]:
    main = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight = nn.Parameter(main.bfloat16())
    kind = Fp8Linear if len(shape) == 2 else Fp8GroupedLinear
    return kind(Fp8Settings(recipe, FORMATS["hybrid"]), LinearSplit(), weight), weight, main


def bits(pair: Any) -> list[Tensor]:
    """Values and factors of both layouts."""
    return [part for side in (pair.rows, pair.columns) for part in (side.values.view(torch.uint8), side.factors)]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("shape", [(144, 272), (3, 144, 272), (1, 16, 16)])
def test_a_gathered_weight_is_the_quantised_weight(recipe: str, shape: tuple[int, ...]) -> None:
    (layer, weight, main), (other, _, _) = made(recipe, shape), made(recipe, shape)
    for history in (0.0, 3.0):  # delayed scaling before its first step, and later
        for each in (layer, other) if recipe == "delayed" else ():
            each.scaling.amax_history.data.fill_(history)
            each.scaling.forget()
        exact = layer._quantize(weight, rows=True, columns=True)
        gathered = Gathered(other, main)
        ours = other._pair_of(gathered.codes, gathered.scales, columns=True)
        for found, expected in zip(bits(ours), bits(exact), strict=True):
            assert found.shape == expected.shape and torch.equal(found, expected)
        if recipe == "delayed":
            assert torch.equal(layer.scaling.take_seen(), other.scaling.take_seen())


def test_a_layer_reads_the_gathered_weight_at_fixed_addresses() -> None:
    layer, weight, main = made("tensorwise", (32, 64))
    layer.take_gathered_weight(gathered := Gathered(layer, main))
    layer.fix_storage()
    addresses = [part.data_ptr() for part in bits(layer._quantized_weight(weight, rows=True))]
    assert addresses[0] == gathered.codes.data_ptr()
    changed = Gathered(layer, main * 2)
    gathered.codes.view(torch.uint8).copy_(changed.codes.view(torch.uint8))  # as a gather does
    gathered.scales, gathered.number = changed.scales, 2
    layer.refresh()
    pair = layer._quantized_weight(weight, rows=True)
    assert [part.data_ptr() for part in bits(pair)] == addresses
    expected = layer._quantize((main * 2).bfloat16(), rows=True, columns=True)
    assert all(torch.equal(found, exact) for found, exact in zip(bits(pair), bits(expected), strict=True))


def test_a_gathered_weight_keeps_its_scale_until_it_changes() -> None:
    layer, _, main = made("delayed", (32, 64))
    layer.scaling.add_step(torch.ones(3))
    gathered = Gathered(layer, main)
    assert gathered.scales == 448.0
    layer.scaling.add_step(torch.full((3,), 2.0))
    assert gathered.scales == 448.0 and layer.scaling.scale_of(Role.WEIGHTS) == 224.0
