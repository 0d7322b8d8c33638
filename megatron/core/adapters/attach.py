"""Gives the linear layers of a built model low-rank adapters, and freezes all its other weights."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.adapters.config import LoraConfig
from megatron.core.adapters.layers import (
    AdaptedGroupedLinear,
    AdaptedLinear,
    LowRank,
    RowPart,
    part_of_rows,
    smaller_side,
)
from megatron.core.adapters.targets import DEFAULT, parts_of_layer
from megatron.core.exceptions import UserError
from megatron.core.initializers import Constant, Uniform, each_of
from megatron.core.ops.dropout.dropout import DropoutRngPosition, dropout_tokens
from megatron.core.ops.moe.grouped_linear import is_one_product
from megatron.core.parameters import Box, ParameterInfo, info_of, initialize_parameter
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.replicated import ReplicatedLinear
from megatron.core.tensor_parallel.storage import new_parameter
from megatron.core.transformer.layer_inputs import LayerInputs, sequence_slice
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.grouped_weights import GroupedLinear
from megatron.core.transformer.shared_key_values import SharedKeyValueLinear
from megatron.core.transformer.transformer_config import TransformerConfig

CHILD = "adapters"
"""Name of a layer's child module that holds its adapters."""

_LINEAR = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, GroupedLinear)


@dataclass(frozen=True)
class Attached:
    """The names that a model chunk answered."""

    used: set[str] = field(default_factory=set)
    """Names of --lora-target-modules that some layer answers."""
    available: set[str] = field(default_factory=set)
    """Names of all linear layers of the chunk."""


def is_adapter(name: str) -> bool:
    """Whether a canonical name is that of a parameter of an adapter, or of its optimizer state."""
    return f".{CHILD}." in name


def add_adapters(model: nn.Module, lora: LoraConfig, config: TransformerConfig) -> None:
    """Freezes a model chunk and gives its linear layers adapters: A random, as functions of the seed and the
    parameter's name, and B zero, so that the model's outputs stay the same at first. Call it before the model is
    wrapped. `check_targets` says whether all names of --lora-target-modules were found.

    Raises UserError if a rank is larger than a matrix allows, or for a layer that cannot have an adapter.
    """
    assert lora.lora_rank is not None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for path, layer, parts, _ in list(_targets(model, lora)):
        if parts:
            _adapt(layer, path, parts, lora, config)
    needs_sizes_on_host(model)
    _let_gradients_begin(model)
    if lora.lora_dropout:
        _tell_dropout_positions(model, config)


def answered_targets(model: nn.Module, lora: LoraConfig) -> Attached:
    """Returns the names that a model chunk, with or without its adapters, answers."""
    attached = Attached()
    for path, _, _, used in _targets(model, lora):
        attached.available.add(path.rpartition(".")[2])
        attached.used.update(used)
    return attached


def _targets(model: nn.Module, lora: LoraConfig) -> Iterator[tuple[str, nn.Module, list[RowPart], set[str]]]:
    """Yields each linear layer with its path, its parts that get an adapter, and the names that it answers."""
    wanted = lora.lora_target_modules or DEFAULT
    for path, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        name = path.rpartition(".")[2]
        if isinstance(layer, SharedKeyValueLinear) and parts_of_layer(name, (1, 3, 1), wanted)[0]:
            raise UserError(
                f"--lora-target-modules: {path} has fewer query groups than there are tensor parallel ranks, so it "
                "cannot have an adapter; give a smaller --tensor-model-parallel-size"
            )
        if isinstance(layer, _LINEAR) and weight is not None and not info_of(weight).embedding_or_output:
            yield path, layer, *parts_of_layer(name, _rows(info_of(weight).global_shape, layer), wanted)


def check_targets(lora: LoraConfig, used: set[str], available: set[str]) -> None:
    """Raises UserError for a name of --lora-target-modules that no layer of the whole model answers."""
    unknown = sorted(set(lora.lora_target_modules or ()) - used)
    if unknown or not used:
        what = ", ".join(unknown or DEFAULT)
        raise UserError(
            f"--lora-target-modules: the model has no linear layer {what}; it has {', '.join(sorted(available))}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# One layer


def _info(layer: nn.Module) -> ParameterInfo:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return info_of(weight)


def _rows(shape: tuple[int, ...], layer: nn.Module) -> tuple[int, ...]:
    """Returns the dimensions of the rows of a weight [experts?, *rows, in]."""
    return shape[1:-1] if _info(layer).grid == "expert" else shape[:-1]


def _adapt(layer: Any, path: str, parts: list[RowPart], lora: LoraConfig, config: TransformerConfig) -> None:
    info, rank = _info(layer), lora.lora_rank
    assert rank is not None
    if lora.lora_base_weights == "nf4":
        layer.weight.info = dataclasses.replace(info, in_nf4=True)
    if info.grid == "expert":
        for flag, given in (("--use-dora", lora.use_dora), ("--lora-dropout", lora.lora_dropout)):
            if given:
                raise UserError(
                    f"{flag} does not go with adapters of experts ({path}): leave it out, or give "
                    "--lora-target-modules linear_qkv linear_proj"
                )
    for part in parts:
        most = smaller_side(part, _rows(info.global_shape, layer), info.global_shape[-1])
        if rank > most:
            which = path if part.stop is None else f"{part.name} of {path}"
            raise UserError(f"--lora-rank {rank}: {which} has {most} rows or columns; give a rank of at most {most}")
    adapters = nn.ModuleDict({part.name: _low_rank(layer, part, lora, config) for part in parts})
    layer.add_module(CHILD, adapters)
    rows = _rows(info.box.shape, layer)
    if isinstance(layer, GroupedLinear):
        plain = layer.backend.experts.grouped_linear
        layer.linear = AdaptedGroupedLinear(layer.linear, adapters, rows, plain)
        return
    columns = layer.tp_group if isinstance(layer, RowParallelLinear) else None
    layer.linear = AdaptedLinear(layer.linear, adapters, rows, columns)


def _low_rank(layer: nn.Module, part: RowPart, lora: LoraConfig, config: TransformerConfig) -> LowRank:
    """Returns the adapter of a part of a layer's rows, split over ranks as the layer's weight is."""
    info, rank = _info(layer), lora.lora_rank
    assert rank is not None
    lead = 1 if info.grid == "expert" else 0
    shape, box = info.global_shape, info.box
    axis = "etp" if lead else "tp"
    by_rows, by_columns = _split(layer, axis)
    kept = info.sharded_axes - {axis}
    inherited = info.partial_gradient_axes
    columns = Uniform(-1 / math.sqrt(shape[-1]), 1 / math.sqrt(shape[-1]))
    stacked = isinstance(layer, GroupedLinear)

    def stored(whole: Box) -> tuple[int, ...]:
        """The shape of a parameter: experts of a stack, rows, columns."""
        matrix = math.prod(whole.shape[lead:-1]), whole.shape[-1]
        return (whole.shape[0], *matrix) if stacked else matrix

    box_a = Box((*box.start[:lead], 0, box.start[-1]), (*box.shape[:lead], rank, box.shape[-1]))
    lora_a = new_parameter(
        config,
        stored(box_a),
        each_of(columns) if lead else columns,
        global_shape=(*shape[:lead], rank, shape[-1]),
        box=box_a,
        sharded_axes=kept | ({axis} if by_columns else frozenset()),
        partial_gradient_axes=inherited | ({axis} if by_rows and not _sums_gradients(layer) else frozenset()),
        grid=info.grid,
    )
    rows = part_of_rows(part, shape[lead:-1])
    own = part_of_rows(part, box.shape[lead:-1])
    assert part.stop is None or box.start[lead + part.axis] == 0, "ranks divide another dimension of the rows"
    box_b = Box((*box.start[:-1], 0), (*box.shape[:lead], *own, rank))
    of_rows: dict[str, frozenset[str]] = {
        "sharded_axes": kept | ({axis} if by_rows else frozenset()),
        "partial_gradient_axes": inherited | ({axis} if by_columns else frozenset()),
    }
    lora_b = new_parameter(
        config,
        stored(box_b),
        Constant(0.0),
        global_shape=(*shape[:lead], *rows, rank),
        box=box_b,
        **of_rows,
        grid=info.grid,
    )
    magnitude = None
    if lora.use_dora:
        box_m = Box(box_b.start[:-1], box_b.shape[:-1])
        magnitude = new_parameter(
            config, (box_m.numel,), Constant(1.0), global_shape=rows, box=box_m, **of_rows, grid=info.grid
        )
    prefix = f"{info.name.removesuffix('.weight')}.{CHILD}.{part.name}"
    for name, parameter in (("lora_a", lora_a), ("lora_b", lora_b), ("magnitude", magnitude)):
        if parameter is not None:
            _name(parameter, f"{prefix}.{name}", config)
    scale, dropout = lora.lora_scale, lora.lora_dropout
    return LowRank(part, lora_a, lora_b, magnitude, scale=scale, dropout=dropout, first_column=box.start[-1])


def _name(parameter: nn.Parameter, name: str, config: TransformerConfig) -> None:
    parameter.info = dataclasses.replace(info_of(parameter), name=name)  # type: ignore[attr-defined]
    if parameter.device.type != "meta" and config.perform_initialization:
        initialize_parameter(parameter, config.seed)


def _split(layer: nn.Module, axis: str) -> tuple[bool, bool]:
    """Returns whether ranks divide the rows of a weight, and whether they divide its columns."""
    is_split = axis in _info(layer).sharded_axes
    by_columns = layer.splits_inputs if isinstance(layer, GroupedLinear) else isinstance(layer, RowParallelLinear)
    return is_split and not by_columns, is_split and by_columns


def _sums_gradients(layer: nn.Module) -> bool:
    """Whether backward sums the gradient of B^T dy over the ranks that divide the rows of B, for all tokens."""
    return isinstance(layer, ColumnParallelLinear) and layer.gradient_group is not None and not layer.sequence_parallel


# ---------------------------------------------------------------------------------------------------------------------
# The model around the layers


def _let_gradients_begin(model: nn.Module) -> None:
    """Makes the embedding's output require a gradient. The frozen weights before the first adapter require none, and
    recomputation, weight gathering and pipeline stages expect activations that do."""

    def begin(module: nn.Module, inputs: object, output: object) -> object:
        if isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()
        return output

    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "embedding":
            module.register_forward_hook(begin)


def _tell_dropout_positions(model: nn.Module, config: TransformerConfig) -> None:
    """Tells the adapters of each layer which tokens pass it, when the layer is called."""
    for layer in model.modules():
        if isinstance(getattr(layer, "layer_number", None), int) and hasattr(layer, "add_branches"):
            layer.register_forward_pre_hook(partial(_tell_layer, config=config), with_kwargs=True)


def _tell_layer(layer: Any, inputs: tuple[object, ...], keywords: dict[str, object], config: TransformerConfig) -> None:
    given = next((value for value in (*inputs, *keywords.values()) if isinstance(value, LayerInputs)), None)
    for site, linear, adapter in _adapters_of(layer):
        adapter.position = None
        if given is not None and layer.training:
            keep = layer.backend.dropout.keep_rows
            tokens = given.dropout or dropout_tokens(given.tokens, adapter.lora_a.device, keep)
            if _reads_own_tokens(linear, config):
                tokens = sequence_slice(tokens, getattr(linear, "tp_group", None)) or tokens
            adapter.position = DropoutRngPosition(tokens, layer.layer_number, f"{given.stack}{site}")


def _adapters_of(layer: nn.Module) -> Iterator[tuple[str, nn.Module, LowRank]]:
    """Yields the adapters in a transformer layer with their paths, and the linear layers that they belong to."""
    for path, module in layer.named_modules():
        adapters = module._modules.get(CHILD)
        for name, adapter in adapters.named_children() if adapters is not None else ():
            if isinstance(adapter, LowRank):
                yield f"{path}.{name}", module, adapter


def _reads_own_tokens(linear: nn.Module, config: TransformerConfig) -> bool:
    """Whether the layer's input has only the tokens of this sequence parallel rank."""
    if isinstance(linear, ReplicatedLinear):
        return "tp" in info_of(linear.weight).partial_gradient_axes
    return isinstance(linear, ColumnParallelLinear) and linear.sequence_parallel


def needs_sizes_on_host(model: nn.Module) -> None:
    """Lets grouped experts read the numbers of their rows on the host if an adapter's product needs them there."""
    for experts in model.modules():
        if isinstance(experts, GroupedMLP):
            for _, _, adapter in _adapters_of(experts):
                if not all(is_one_product(p.dtype, *p.shape[1:]) for p in (adapter.lora_a, adapter.lora_b)):
                    experts.reads_sizes = True
