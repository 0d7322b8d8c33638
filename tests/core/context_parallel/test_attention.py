"""Attention of split rows against a plain one of whole rows, in float64: output and gradients, for every way of
exchanging and every feature."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from support import fused_kernels
from support.processes import run_on_ranks
from support.tiny_models import tiny_config
from torch import Tensor

from megatron.core.attention_plan import KernelChoice, KernelPlan
from megatron.core.context_parallel.splitting import cut_rows
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.ops.attention.kernels import FLASH_BLOCKS, FUSED_BLOCKS, BlockKernel, Situation
from megatron.core.ops.attention.unfused import AttentionVariant
from megatron.core.ops.dropout.dropout import dropout_tokens, keep_attention
from megatron.core.tokens import RngPosition, SequencePart, Tokens
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.layer_inputs import LayerInputs

HEADS, WIDTH, ROW = 4, 6, 24
PACKED = [0, 3, 3, 4, 11, 12, 22, 24]

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "all keys": {"causal": False},
    "window": {"window": (4, 0)},
    "short window": {"window": (2, 0)},
    "window both ways": {"window": (2, 5), "causal": False},
    "window to the right": {"window": (-1, 4), "causal": False},
    "packed": {"documents": PACKED},
    "packed, one long document": {"documents": [0, 2, 23, 24]},
    "packed, window": {"documents": [0, 2, 17, 24], "window": (7, 0)},
    "packed, all keys": {"documents": PACKED, "causal": False},
    "two groups": {"groups": 2},
    "one group": {"groups": 1},
    "dropout": {"dropout": 0.3},
    "dropout, packed, two groups": {"dropout": 0.3, "documents": PACKED, "groups": 2},
    "dropout, window": {"dropout": 0.3, "window": (5, 0)},
    "off-by-one": {"softmax_type": "off-by-one"},
    "learnt sink, window": {"softmax_type": "learnable", "window": (4, 0)},
    "learnt sink, dropout, packed": {"softmax_type": "learnable", "dropout": 0.3, "documents": PACKED},
    "mask of whole rows": {"mask": (2, 1, ROW, ROW)},
    "mask of this rank's queries": {"mask": (2, HEADS, ROW, ROW), "cut": True},
    "mask of keys": {"mask": (2, 1, 1, ROW), "causal": False, "dropout": 0.3},
    "mask, packed, dropout": {"mask": (1, HEADS, ROW, ROW), "documents": PACKED, "dropout": 0.3},
    "mask that hides all": {"mask": (1, 1, ROW, ROW), "hides_all": True},
}
LAYOUTS = [("p2p", 2), ("p2p", 4), ("a2a", 2), ("a2a", 4), ("a2a+p2p", 4)]


def dense(q: Tensor, k: Tensor, v: Tensor, feature: dict[str, Any], mask: Tensor | None, sink: Tensor | None) -> Tensor:
    """softmax over an explicit matrix of what is visible, one head at a time."""
    s, b, a, d = q.shape
    left, right = feature.get("window", (-1, -1))
    visible = torch.ones(b, a, s, s, dtype=torch.bool)
    edges = feature.get("documents", [0, s])
    document = [sum(edge <= i for edge in edges[1:]) for i in range(s)]
    for i, j in itertools.product(range(s), range(s)):
        meets = document[i] == document[j] and not (feature.get("causal", True) and j > i)
        visible[:, :, i, j] = meets and not 0 <= left < i - j and not 0 <= right < j - i
    if mask is not None:
        visible &= ~mask
    keep = torch.ones(b, a, s, s, dtype=torch.float64)
    if feature.get("dropout"):
        place = LayerInputs(Tokens(s, b), dropout=dropout_tokens(Tokens(s, b, random=PLACE), q.device))
        index = place.dropout.index.view(s, b).t()
        site = place.dropout_position(3, "attention")
        keep = keep_attention(site, index, index, torch.arange(a), feature["dropout"]).double() / (
            1 - feature["dropout"]
        )
    heads = []
    for row, head in itertools.product(range(b), range(a)):
        group = head * k.shape[2] // a
        scores = q[:, row, head] @ k[:, row, group].T / math.sqrt(d)
        scores = scores.where(visible[row, head], torch.finfo(scores.dtype).min)
        if sink is not None:
            scores = torch.cat([scores, sink[head].expand(s, 1)], 1)
        heads.append((scores.softmax(-1)[:, :s] * keep[row, head]) @ v[:, row, group])
    return torch.stack(heads, 1).unflatten(1, (b, a))


PLACE = RngPosition(7, 3, first_sample=5)


def problem(feature: dict[str, Any]) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Query, key, value and a sink; the gradient of the output; the mask."""
    generator = torch.Generator().manual_seed(len(str(feature)))
    b, g = 1 if "documents" in feature else 2, feature.get("groups", HEADS)
    shapes = [(ROW, b, HEADS, WIDTH), (ROW, b, g, WIDTH), (ROW, b, g, WIDTH), (HEADS,)]
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    gradient = torch.randn(shapes[0], dtype=torch.float64, generator=generator)
    mask = None
    if "mask" in feature:
        mask = torch.rand((min(b, feature["mask"][0]), *feature["mask"][1:]), generator=generator) < 0.4
        if mask.shape[2] > 1:
            mask[:, :, range(ROW), range(ROW)] = False
        if feature.get("hides_all"):
            mask[:, :, 5] = mask[:, :, 17] = True
    return tensors, gradient, mask


@functools.cache
def references() -> dict[str, list[Tensor]]:
    """Output and gradients of whole rows, for each feature. The ranks get them from the process of the test."""
    return {name: reference(feature) for name, feature in FEATURES.items()}


def reference(feature: dict[str, Any]) -> list[Tensor]:
    tensors, gradient, mask = problem(feature)
    for tensor in tensors:
        tensor.requires_grad_()
    kind = feature.get("softmax_type", "vanilla")
    sink = {"vanilla": None, "off-by-one": torch.zeros(HEADS, dtype=torch.float64), "learnable": tensors[3]}[kind]
    output = dense(*tensors[:3], feature, mask, sink)
    inputs = tensors if kind == "learnable" else tensors[:3]
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def layer_of(feature: dict[str, Any], groups: ProcessGroupCollection, **settings: Any) -> DotProductAttention:
    config = tiny_config(
        num_layers=4,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=feature.get("groups", HEADS),
        attention_dropout=feature.get("dropout", 0.0),
        window_size=feature.get("window"),
        softmax_type=feature.get("softmax_type", "vanilla"),
        attention_backend=AttnBackend.unfused if feature.get("hides_all") else AttnBackend.auto,
        **settings,
    )
    kind = AttnMaskType.causal if feature.get("causal", True) else AttnMaskType.no_mask
    return DotProductAttention(config, 3, kind, "self", pg_collection=groups)


def split(
    feature: dict[str, Any],
    groups: ProcessGroupCollection,
    part: SequencePart,
    kernel: BlockKernel | None = None,
    **settings: Any,
) -> list[Tensor]:
    """What this rank has of the output and of the gradients."""
    layer = layer_of(feature, groups, **settings)
    if kernel is not None:
        assert layer.context is not None
        choices = {situation: KernelChoice(kernel, ()) for situation in layer.context.blocks.choices}
        layer.context.blocks = KernelPlan(choices)
    tensors, gradient, mask = problem(feature)
    tp, rank = groups.size("tp"), groups.rank("tp")
    mine = [cut_rows(tensor, part, 0).chunk(tp, 2)[rank].requires_grad_() for tensor in tensors[:3]]
    if layer.softmax_offset is not None:
        layer.softmax_offset.data.copy_(tensors[3].chunk(tp)[rank])
        mine.append(layer.softmax_offset)
    edges = torch.tensor(feature["documents"], dtype=torch.int32) if "documents" in feature else None
    held = Tokens(
        ROW // part.size, mine[0].shape[1], part, cu_seqlens=edges, max_seqlen=ROW, sample_length=ROW, random=PLACE
    )
    inputs = LayerInputs(held, dropout=dropout_tokens(held, torch.device("cpu")))
    if mask is not None and feature.get("cut"):
        mask = cut_rows(mask, part, 2)
    output = layer(*mine[:3], mask, inputs=inputs)
    found = torch.autograd.grad(output, mine, cut_rows(gradient, part, 0).chunk(tp, 2)[rank].flatten(2))
    return [output.detach().unflatten(2, (-1, WIDTH)), *found]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest over tensors, relative to the largest element; NaN where there is one."""
    pairs = zip(found, expected, strict=True)
    return torch.stack([(ours - theirs).abs().max() / theirs.abs().max() for ours, theirs in pairs]).max().item()


def failures(ranks: list[dict[str, float]]) -> list[tuple[int, str, float]]:
    return [
        (rank, case, found) for rank, errors in enumerate(ranks) for case, found in errors.items() if not found < 1e-13
    ]


def errors_on_rank(wholes: dict[str, list[Tensor]], tensor_size: int) -> dict[str, float]:
    """Largest relative error of this rank for each case."""
    world, rank, errors = torch.distributed.get_world_size(), torch.distributed.get_rank(), {}
    layouts = LAYOUTS if tensor_size == 1 else [("p2p", 2), ("a2a", 2)]
    for cp_comm_type, size in layouts:
        grid = RankGrid(world, tensor=tensor_size, context=size)
        levels = [2, 2] if size == 4 else None
        groups = ProcessGroupCollection.from_grid(grid, rank, hierarchical_context_sizes=levels)
        part = SequencePart(groups.rank("cp"), size)
        # Ranks 0 and 1 compute every second feature, and ranks 2 and 3 the others, where two ranks split a row.
        replicas, replica = groups.size("dp"), groups.rank("dp")
        for name, feature in list(FEATURES.items())[replica::replicas]:
            if tensor_size > 1 and (feature.get("groups") == 1 or feature.get("mask", (1, 1))[1] > 1):
                continue
            found = split(feature, groups, part, cp_comm_type=cp_comm_type)
            if len(found) == 5:  # the sink's gradient is partial, as all parameters' are
                torch.distributed.all_reduce(found[4], group=groups.cp)
            whole = wholes[name]
            tp_rank = groups.rank("tp")
            expected = [cut_rows(tensor, part, 0).chunk(tensor_size, 2)[tp_rank] for tensor in whole[:4]]
            expected += [tensor.chunk(tensor_size)[tp_rank] for tensor in whole[4:]]
            errors[f"{cp_comm_type} {size}: {name}"] = error(found, expected)
        groups.close()
    return errors


def errors_of_fused_kernels(wholes: dict[str, list[Tensor]]) -> dict[str, float]:
    """Returns the errors of the kernels of a GPU, with stand-ins for what only a GPU has."""
    fused_kernels.put_in_place()
    errors = {}
    groups = ProcessGroupCollection.from_grid(
        RankGrid(4, context=4), torch.distributed.get_rank(), hierarchical_context_sizes=[2, 2]
    )
    part = SequencePart(groups.rank("cp"), 4)
    for cp_comm_type, kernel in itertools.product(("p2p", "a2a+p2p"), (FUSED_BLOCKS, FLASH_BLOCKS)):
        for name, feature in FEATURES.items():
            situation = Situation("cuda", torch.bfloat16, True, "documents" in feature)
            variant = AttentionVariant(1.0, feature.get("causal", True), dropout=feature.get("dropout", 0.0))
            if "mask" in feature or kernel.refusal(variant, situation) is not None:
                continue
            found = split(feature, groups, part, kernel, cp_comm_type=cp_comm_type)[:4]
            expected = [cut_rows(tensor, part, 0) for tensor in wholes[name][:4]]
            errors[f"{cp_comm_type}, {kernel.name}: {name}"] = error(found, expected)
    return errors


@pytest.mark.slow
def test_fused_kernels_against_whole_rows() -> None:
    ranks = run_on_ranks(errors_of_fused_kernels, 4, references())
    assert len(ranks[0]) >= 50
    assert not failures(ranks)


@pytest.mark.fast("2")
@pytest.mark.parametrize("tensor_size", [1, 2])
def test_against_whole_rows(tensor_size: int) -> None:
    ranks = run_on_ranks(errors_on_rank, 4, references(), tensor_size)
    cases = set().union(*ranks)
    assert tensor_size > 1 or len(cases) == len(LAYOUTS) * len(FEATURES)
    assert len(cases) >= 30
    assert not failures(ranks)
