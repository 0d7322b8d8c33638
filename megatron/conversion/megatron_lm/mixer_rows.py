"""The rows of Mamba-2 layers and gated delta nets in Megatron-LM's order.

We hold the rows of a group of heads together: its z, x, B, C and dt. Megatron-LM's modules hold z of all groups, then x
of all groups, and so on. Its torch_dist checkpoints store each of these parts by itself, as `in_proj.weight.z`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowOrder:
    """The parts of a tensor [groups, rows of a group, ...] in the order in which Megatron-LM's module holds them."""

    shape: tuple[int, ...]
    widths: Mapping[str, int]
    """Rows of each part in a group, by the part's name in a torch_dist checkpoint."""

    def part_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parts of all groups by their names, for the name of the tensor."""
        return {f"{name}.{part}": (self.shape[0] * width, *self.shape[2:]) for part, width in self.widths.items()}

    def split(self, values: Tensor) -> list[Tensor]:
        """Returns the elements of each part, one-dimensional, for our elements."""
        whole = values.view(self.shape)
        return [whole[:, begin:end].flatten() for begin, end in self._spans]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns our elements, one-dimensional, for those of each part."""
        whole = torch.empty(self.shape, dtype=parts[0].dtype)
        for (begin, end), values in zip(self._spans, parts, strict=True):
            whole[:, begin:end] = values.view(self.shape[0], end - begin, *self.shape[2:])
        return whole.flatten()

    def to_module(self, values: Tensor) -> Tensor:
        """Returns the elements as Megatron-LM's module holds them, one-dimensional, for our elements."""
        return torch.cat(self.split(values))

    def from_module(self, values: Tensor) -> Tensor:
        """Returns our elements, one-dimensional, for those of Megatron-LM's module."""
        return self.join(values.flatten().split([torch.Size(shape).numel() for shape in self.part_shapes("").values()]))

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self.widths.values(), initial=0)))


def row_orders(shapes: Mapping[str, Sequence[int]]) -> dict[str, RowOrder]:
    """Returns the orders of those tensors whose rows differ, by name, for the shapes of all tensors of a model or of a
    rank. The sizes of heads follow from the shapes."""
    orders: dict[str, RowOrder] = {}
    for name in shapes:
        mixer, _, parameter = name.rpartition(".")
        if parameter == "D":  # only Mamba-2 layers have it
            orders |= _of_mixer(mixer, shapes, _mamba_widths(mixer, shapes))
        elif name.endswith(".out_norm.weight"):  # only gated delta nets have it
            mixer = mixer.removesuffix(".out_norm")
            orders |= _of_mixer(mixer, shapes, _delta_widths(mixer, shapes))
    return orders


def _of_mixer(mixer: str, shapes: Mapping[str, Sequence[int]], widths: Mapping[str, int]) -> dict[str, RowOrder]:
    convolved = {part: width for part, width in widths.items() if part in _CONVOLVED}
    by_name = {"in_proj.weight": widths, "conv1d.weight": convolved, "conv1d.bias": convolved}
    names = {f"{mixer}.{name}": parts for name, parts in by_name.items()}
    return {name: RowOrder(tuple(shapes[name]), parts) for name, parts in names.items() if name in shapes}


_CONVOLVED = ("x", "B", "C", "query", "key", "value")


def _mamba_widths(mixer: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    groups, rows = shapes[f"{mixer}.conv1d.bias"]
    channels = shapes[f"{mixer}.norm_weight"][0] // groups
    state, heads = (rows - channels) // 2, shapes[f"{mixer}.D"][0] // groups
    return {"z": channels, "x": channels, "B": state, "C": state, "dt": heads}


def _delta_widths(mixer: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    key_heads, rows = shapes[f"{mixer}.conv1d.weight"][:2]
    heads = shapes[f"{mixer}.A_log"][0] // key_heads
    values = heads * shapes[f"{mixer}.out_norm.weight"][0]
    keys = (rows - values) // 2
    return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}
