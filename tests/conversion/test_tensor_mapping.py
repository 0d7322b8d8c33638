"""Hub tensors as boxes of canonical tensors, and how files share them."""

from collections.abc import Callable

import pytest
import torch

from megatron.conversion.tensor_mapping import (
    GATE,
    KEYS,
    QUERIES,
    UP,
    VALUES,
    Axes,
    HubTensor,
    HubTensorPattern,
    hub_tensors,
    split_into_files,
)
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

MAPPING = {
    "decoder.layers.{layer}.qkv.weight": tuple(
        HubTensorPattern(f"layers.{{layer}}.{name}.weight", part)
        for name, part in (("q", QUERIES), ("k", KEYS), ("v", VALUES))
    ),
    "decoder.layers.{layer}.fc1.weight": (
        HubTensorPattern("layers.{layer}.{expert}.gate.weight", GATE),
        HubTensorPattern("layers.{layer}.{expert}.up.weight", UP),
    ),
    "norm.weight": (HubTensorPattern("norm.weight"),),
    "decoder.layers.{layer}.fc1.bias": (HubTensorPattern("layers.{layer}.gate.bias", GATE),),
}


def test_queries_keys_and_values_are_slices_of_each_group() -> None:
    """3 groups of 2 query heads of width 4: 24 rows of queries, 12 of keys."""
    found = hub_tensors(MAPPING, {"decoder.layers.7.qkv.weight": (3, 4, 4, 5)})
    assert [(tensor.name, tensor.shape) for tensor in found] == [
        ("layers.7.q.weight", (24, 5)),
        ("layers.7.k.weight", (12, 5)),
        ("layers.7.v.weight", (12, 5)),
    ]
    assert [tensor.boxes for tensor in found] == [
        (Box((0, 0, 0, 0), (3, 2, 4, 5)),),
        (Box((0, 2, 0, 0), (3, 1, 4, 5)),),
        (Box((0, 3, 0, 0), (3, 1, 4, 5)),),
    ]


def test_a_fused_tensor_has_its_parts_one_after_another() -> None:
    """Queries of both groups, then keys, then values, in a tensor of 2 groups of 2 query heads of width 1."""
    pattern = HubTensorPattern("qkv", QUERIES, fused=(KEYS, VALUES))
    (fused,) = hub_tensors({"qkv.weight": (pattern,)}, {"qkv.weight": (2, 4, 1, 3)})
    canonical = torch.arange(24).view(2, 4, 1, 3)
    parts = [canonical[:, begin:end].flatten() for begin, end in ((0, 2), (2, 3), (3, 4))]
    rows = fused.join(parts).view(fused.shape)
    assert fused.shape == (8, 3)
    assert (rows[:, 0] // 3).tolist() == [0, 1, 4, 5, 2, 6, 3, 7]
    for part, box in zip(parts, fused.boxes, strict=True):
        assert torch.equal(fused.take(rows, box), part)


@pytest.mark.parametrize(
    ("axes", "shape", "laid_out"),
    [
        (((3,), (1, 0, 2)), (5, 24), lambda w: w.permute(3, 1, 0, 2).flatten(1)),  # GPT-2: transposed, q, k, v in turn
        (((0,), (3,), (2, 1)), (2, 5, 12), lambda w: w.permute(0, 3, 2, 1).flatten(2)),  # gpt-oss: rows interleaved
    ],
)
def test_dimensions_in_another_order(
    axes: Axes, shape: tuple[int, ...], laid_out: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    canonical = torch.arange(120).view(2, 3, 4, 5)
    (tensor,) = hub_tensors({"w.weight": (HubTensorPattern("w", axes=axes),)}, {"w.weight": (2, 3, 4, 5)})
    hub = tensor.join([canonical.flatten()]).view(tensor.shape)
    assert tensor.shape == shape
    assert torch.equal(hub, laid_out(canonical))
    assert torch.equal(tensor.take(hub, tensor.boxes[0]), canonical.flatten())


def test_experts_are_indices_of_the_first_axis() -> None:
    found = hub_tensors(MAPPING, {"decoder.layers.0.fc1.weight": (2, 2, 6, 5)})
    assert [tensor.name for tensor in found] == [
        f"layers.0.{e}.{half}.weight" for e in (0, 1) for half in ("gate", "up")
    ]
    assert found[3].boxes == (Box((1, 1, 0, 0), (1, 1, 6, 5)),) and found[3].shape == (6, 5)


def test_a_bias_and_a_norm_have_one_dimension() -> None:
    bias, norm = hub_tensors(MAPPING, {"decoder.layers.1.fc1.bias": (2, 6), "norm.weight": (5,)})
    assert (bias.shape, norm.shape) == ((6,), (5,))
    assert norm.nbytes(torch.bfloat16) == 10 and norm.global_shape == (5,)


def test_a_canonical_tensor_that_the_mapping_lacks_is_named() -> None:
    with pytest.raises(UserError, match=r"the architecture has no tensor for a, b, c, d, e and 2 more$"):
        hub_tensors(MAPPING, dict.fromkeys("abcdefg", (1,)))


def test_files_hold_at_most_their_size_or_one_tensor() -> None:
    sizes = [3, 3, 9, 2, 4, 1]
    tensors = [HubTensor(str(size), "w", (size,), (Box((0,), (size,)),)) for size in sizes]
    files = split_into_files(tensors, lambda tensor: torch.float16, 12)
    assert [[tensor.numel for tensor in file] for file in files] == [[3, 3], [9], [2, 4], [1]]


def test_alternating_parts_are_an_axis_of_their_own() -> None:
    """2 groups of 2 query heads and their 2 gates, then key and value, of width 1: each head has its gate behind it."""
    parts = (slice(None), slice(0, 2)), (slice(None), slice(2, 4))
    pattern = HubTensorPattern("q", parts[0], fused=(parts[1],), alternate_behind=1)
    (found,) = hub_tensors({"qkv.weight": (pattern,)}, {"qkv.weight": (2, 6, 1, 3)})
    canonical = torch.arange(36).view(2, 6, 1, 3)
    boxes = [canonical[part].flatten() for part in parts]
    assert found.shape == (8, 3)
    rows = found.join(boxes)
    assert (rows.view(8, 3)[:, 0] // 3).tolist() == [0, 2, 1, 3, 6, 8, 7, 9]
    for box, values in zip(found.boxes, boxes, strict=True):
        assert torch.equal(found.take(rows, box), values)


def test_a_layer_may_have_names_of_its_own() -> None:
    mapping = {"mtp.layers.{layer}.w": (HubTensorPattern("any"),), "mtp.layers.1.w": (HubTensorPattern("own"),)}
    found = hub_tensors(mapping, {"mtp.layers.0.w": (1,), "mtp.layers.1.w": (1,)})
    assert [tensor.name for tensor in found] == ["any", "own"]
