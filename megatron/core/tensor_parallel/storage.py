"""Placement of a layer's parameters on this rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.core.communication.collectives import Group, group_rank, group_size
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box, declare


def parameter_device(config: ModelParallelConfig) -> torch.device | None:
    """Returns the device on which parameters are created: the current GPU, or torch's default device if there is no GPU
    or `use_cpu_initialization` is set."""
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return None
    if torch.get_default_device().type == "meta":
        return None
    return torch.device("cuda", torch.cuda.current_device())


def new_parameter(
    config: ModelParallelConfig,
    shape: tuple[int, ...],
    init: Callable[[torch.Tensor], Any],
    *,
    global_shape: tuple[int, ...] | None = None,
    box: Box | None = None,
    **facts: Any,
) -> nn.Parameter:
    """Returns a declared parameter (see `megatron.core.parameters.declare`) of the config's type and device. With
    `perform_initialization` its values are drawn by `init` from torch's default generator, so that a layer without a
    model is ready for use; a model initializes its layers again, as functions of their names."""
    parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=parameter_device(config)))
    declare(parameter, init, global_shape=global_shape, box=box, **facts)
    if config.perform_initialization and parameter.device.type != "meta":
        with torch.no_grad():
            init(parameter.data)
            parameter.data.view(-1)[parameter.info.box.numel :].zero_()  # type: ignore[attr-defined]
    return parameter


def new_split_vector(
    config: ModelParallelConfig, size: int, init: Callable[[torch.Tensor], object], group: Group
) -> nn.Parameter:
    """Returns a declared parameter [size / ranks] of a vector [size] that the ranks of a tensor parallel group
    divide."""
    box = split_box((size,), 0, group)
    return new_parameter(config, box.shape, init, global_shape=(size,), box=box, sharded_axes=frozenset({"tp"}))


def split_box(shape: tuple[int, ...], dim: int, group: Group) -> Box:
    """Returns this rank's box of a tensor that is split evenly along one dimension. Raises UserError if it cannot
    be."""
    rank = group_rank(group)
    extent = part_size(shape[dim], group, f"dimension {dim} of a parameter {list(shape)}")
    return Box(
        tuple(rank * extent if axis == dim else 0 for axis in range(len(shape))),
        tuple(extent if axis == dim else count for axis, count in enumerate(shape)),
    )


def part_size(whole: int, group: Group, what: str) -> int:
    """Returns the size of each rank's part of `whole`. Raises UserError, naming `what`, if it does not divide
    evenly."""
    size = group_size(group)
    if whole % size:
        below = whole - whole % size
        works = f"{below} or {below + size}" if below else str(size)
        raise UserError(f"{what}: {whole} is not divisible by {size} tensor parallel ranks; use {works}")
    return whole // size


def with_columns(box: Box, columns: int) -> Box:
    """Returns the box with one more dimension, which covers all columns."""
    return Box((*box.start, 0), (*box.shape, columns))
