"""Upcycling: experts begin as copies of a dense MLP, or of parts of it (Komatsuzaki et al. 2022, arXiv:2212.05055; He
et al. 2024, arXiv:2410.07524).

With granularity G an expert has one of G equal parts of the dense MLP's inner channels. Every G neighbouring experts
together have all parts. Their rows of the router are equal, so a token goes to all G of them or to none. The weights of
the experts' second products are multiplied by G. The model then computes the same function as the dense one, if the
weights of a token's experts sum to 1.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.exceptions import UserError
from megatron.core.initializers import Initializer
from megatron.core.parameters import Box

_EXPERTS, _ROUTER = ".mlp.experts.", ".mlp.router."


@dataclass(frozen=True)
class EqualRows:
    """Initial values of a router whose experts come in groups: each `size` rows are equal to the first of them."""

    init: Initializer
    size: int

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fills a whole tensor with torch's generator; returns it."""
        self.init(tensor)
        return tensor.copy_(tensor[:: self.size].repeat_interleave(self.size, 0))


def dense_chunks(chunks: Iterable[Chunk], granularity: int) -> Iterator[Chunk]:
    """Yields the chunks into which a dense checkpoint is read, for the chunks of a model with experts. Each expert's
    memory has the name and box of its part of the dense MLP. Routers have no chunks and keep their values. Raises
    UserError for encoded optimizer state."""
    for chunk in chunks:
        if _EXPERTS in chunk.name:
            yield from _parts(chunk, granularity)
        elif _ROUTER not in chunk.name:
            yield chunk


def _parts(chunk: Chunk, granularity: int) -> Iterator[Chunk]:
    if chunk.encoded is not None:
        raise UserError(
            "moe_use_upcycling does not go with main weights in another form than numbers of a type "
            "(use_precision_aware_optimizer); begin with plain ones"
        )
    (first_expert, *start), (count, *shape) = chunk.box.start, chunk.box.shape
    dim = _divided_dim(chunk)
    whole = list(chunk.global_shape[1:])
    width = whole[dim] if dim is not None else 0
    if dim is not None:
        whole[dim] *= granularity
    size = Box(tuple(start), tuple(shape)).numel
    begin, end = chunk.range
    for number in range(count):
        low, high = max(begin, number * size), min(end, (number + 1) * size)
        if low >= high:
            continue
        place = list(start)
        if dim is not None:
            place[dim] += (first_expert + number) % granularity * width
        yield dataclasses.replace(
            chunk,
            name=chunk.name.replace(_EXPERTS, ".mlp."),
            global_shape=tuple(whole),
            box=Box(tuple(place), tuple(shape)),
            flat_range=(low - number * size, high - number * size),
            tensor=chunk.flat[low - begin : high - begin],
        )


def _divided_dim(chunk: Chunk) -> int | None:
    """Returns the dimension of an expert's tensor that counts its inner channels; None if it has none."""
    if chunk.name.endswith("linear_fc1.weight"):
        return len(chunk.box.shape) - 3
    if chunk.name.endswith("linear_fc1.bias") or chunk.name.endswith("linear_fc2.weight"):
        return len(chunk.box.shape) - 2
    return None


@torch.no_grad()
def enlarge_second_products(chunks: Iterable[Chunk], granularity: int) -> None:
    """Multiplies the weights of the experts' second products by the granularity G, because a token's weight for the
    dense MLP is divided among G neighbouring experts."""
    for chunk in chunks:
        if granularity > 1 and _EXPERTS in chunk.name and chunk.name.endswith("linear_fc2.weight"):
            chunk.tensor.mul_(granularity)
