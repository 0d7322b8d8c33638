"""Frozen weights in 4 bits, for any device: NF4 (Dettmers et al. 2023, "QLoRA", arXiv:2305.14314).

Each block of 64 neighbouring inputs of a row has a scale, its largest absolute value, and each weight is one of 16
numbers between -1 and 1 times the scale: the quantiles of a normal distribution. A layer decodes its weight when it
multiplies, in forward and again in backward, so that only the codes stay in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.adapters.layers import AdaptedGroupedLinear, AdaptedLinear
from megatron.core.communication.collectives import Group, gather_rows, start_all_reduce, start_reduce_scatter_rows
from megatron.core.distributed import DistributedDataParallel
from megatron.core.exceptions import UserError
from megatron.core.ops.linear import linear, product
from megatron.core.parameters import info_of
from megatron.core.utils.autograd_context import AutogradContext

BLOCK = 64
"""Neighbouring inputs of a row with one scale."""
_BLOCK_BYTES = BLOCK // 2 + torch.float32.itemsize

NUMBERS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 numbers of NF4 (appendix E of the paper)."""


@dataclass(frozen=True)
class Nf4Weight:
    """A matrix [out, in] in NF4."""

    packed: Tensor
    """uint8 [out * in / 64 * 36]: for each block its codes, two per byte with the first one in the high bits, and its
    scale in float32. The bytes of neighbouring blocks follow each other, so ranks can shard them."""
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor) -> "Nf4Weight":
        """Rounds a matrix, whose number of columns is a multiple of 64, to the nearest numbers of NF4."""
        blocks = weight.detach().float().reshape(-1, BLOCK)
        scales = blocks.abs().amax(1)
        numbers = torch.tensor(NUMBERS, device=weight.device)
        middles = (numbers[1:] + numbers[:-1]) / 2
        codes = torch.bucketize(blocks / scales.clamp(min=1e-38)[:, None], middles).to(torch.uint8)
        packed = torch.cat([codes[:, ::2] << 4 | codes[:, 1::2], scales[:, None].view(torch.uint8)], 1)
        return cls(packed.flatten(), weight.shape, weight.dtype)

    def decode(self) -> Tensor:
        """Returns the matrix [out, in] in the type that it had."""
        blocks = self.packed.view(-1, _BLOCK_BYTES)
        pairs, scales = blocks[:, : BLOCK // 2], blocks[:, BLOCK // 2 :].view(torch.float32)
        codes = torch.stack([pairs >> 4, pairs & 15], 2).to(torch.int64).view(-1, BLOCK)
        numbers = torch.tensor(NUMBERS, device=self.packed.device)[codes]
        return (numbers * scales).to(self.dtype).view(self.shape)


def nf4_bytes(numel: int) -> int:
    """Returns the bytes that this number of elements, a multiple of 64, takes in NF4."""
    return numel // BLOCK * _BLOCK_BYTES


class Nf4Linear:
    """The function `linear` of a layer whose frozen weight is in NF4. It ignores the weight that it is given."""

    def __init__(self, stored: Nf4Weight) -> None:
        self.stored = stored

    def __call__(
        self,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
        group: Group = None,
        *,
        gathers: bool = False,
    ) -> Tensor:
        """Returns `ops.linear.linear` of the same arguments with the decoded weight; the bias is frozen too."""
        output: Tensor = _Nf4Product.apply(inputs, self.stored, group, gathers)
        return output if bias is None else output + bias


class _Nf4Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, inputs: Tensor, stored: Nf4Weight, group: Group, gathers: bool) -> Tensor:
        ctx.stored, ctx.group, ctx.gathers = stored, group, gathers
        return linear(gather_rows(inputs, group) if gathers else inputs, stored.decode())

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows = output_gradient.reshape(-1, output_gradient.shape[-1])
        gradient = product(rows, ctx.stored.decode())
        start = start_reduce_scatter_rows if ctx.gathers else start_all_reduce
        total = start(gradient, ctx.group).wait()
        return total.view(*_leading(output_gradient, total), total.shape[-1]), None, None, None


def _leading(output_gradient: Tensor, total: Tensor) -> tuple[int, ...]:
    """Returns the leading dimensions of the inputs; ranks may divide the first one."""
    inner = output_gradient.shape[1:-1]
    return (total.shape[0] // inner.numel(), *inner)


def store_in_nf4(model: nn.Module) -> None:
    """Replaces the frozen weights of a model's adapted layers by NF4, each rank its shard if they are sharded. Call it
    after they are loaded.

    Raises UserError for adapters of grouped experts, and for a layer whose inputs on a rank do not divide into blocks:
    the result would depend on the layout.
    """
    units = model.frozen_units if isinstance(model, DistributedDataParallel) else []
    layers = list(_adapted_layers(model))
    for path, layer, adapted in layers:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        if isinstance(adapted, AdaptedGroupedLinear) or info_of(weight).grid == "expert":
            raise UserError(f"--lora-base-weights nf4 does not go with adapters of experts ({path})")
        if weight.shape[1] % BLOCK:
            raise UserError(
                f"--lora-base-weights nf4: {path} has {weight.shape[1]} inputs on a rank, which must be a multiple of "
                f"{BLOCK}"
            )
    sharded: dict[nn.Parameter, Tensor] = {}
    for unit in units:
        if unit.plan.in_nf4:
            parts = unit.replace_weights(Nf4Weight.of(unit.weight_shard).packed)  # slots and shards are whole blocks
            sharded |= {slot.parameter: part for slot, part in zip(unit.slots, parts, strict=True)}
    for _, layer, adapted in layers:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        packed = sharded.get(weight)
        stored = Nf4Weight.of(weight) if packed is None else Nf4Weight(packed, weight.shape, weight.dtype)
        adapted.function, adapted.decode = Nf4Linear(stored), stored.decode
        layer.register_parameter("weight", None)


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, AdaptedLinear]]:
    for path, layer in model.named_modules():
        adapted = getattr(layer, "linear", None)
        if isinstance(adapted, AdaptedLinear) and layer._parameters.get("weight") is not None:
            yield path, layer, adapted
