"""Megatron-LM's attributes of parameters, for code that reads them. This library reads the descriptor that each
parameter carries instead."""

from torch import Tensor

from megatron.core.communication.collectives import Group, group_rank
from megatron.core.groups.defaults import tp_group_or_default
from megatron.core.parameters import info_of

_DEFAULTS: dict[str, object] = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Marks a tensor as split along a dimension, or as not split, for code that reads these attributes."""
    marks = {"tensor_model_parallel": is_parallel, "partition_dim": dim, "partition_stride": stride}
    for name, value in marks.items():
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Marks a tensor as not split, unless it is marked already."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copies the attributes of one tensor to another."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: Group = None) -> bool:
    """Returns whether this rank counts its copy of a parameter: the parameter is split over tensor parallel ranks, or
    this is the first of these ranks."""
    if getattr(param, "tensor_model_parallel", False) or "tp" in info_of(param).sharded_axes:
        return True
    return group_rank(tp_group_or_default(tp_group)) == 0
