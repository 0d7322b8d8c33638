"""The published marks on parameters, for code that reads them; our own reads the descriptor that each carries."""

from typing import Any

from torch import Tensor

from megatron.core.collectives import Group, group_rank
from megatron.core.parameters import info_of
from megatron.core.process_groups_config import default_collection

_DEFAULTS: dict[str, Any] = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark a tensor as cut along a dimension (or not), for code that reads these marks. Ours reads the descriptor."""
    marks = {"tensor_model_parallel": is_parallel, "partition_dim": dim, "partition_stride": stride}
    for name, value in marks.items():
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark a tensor without marks as not cut."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Give one tensor the marks that another has."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: Group = None) -> bool:
    """Whether this rank's copy is the one to count: the parameter is cut over tensor parallel ranks, or this is the
    first of them."""
    if getattr(param, "tensor_model_parallel", False) or "tp" in info_of(param).sharded_axes:
        return True
    return group_rank(tp_group if tp_group is not None else default_collection().tp) == 0
