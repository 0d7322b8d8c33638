"""What a config and a model chunk may bring along: hooks around micro-batches and reductions, optional methods."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.exceptions import UserError


def of_number_and_chunk(function: Callable[..., None] | None) -> Callable[[int, int], None]:
    """The function as one of (number, chunk); one that takes a single argument is given the number."""
    if function is None:
        return lambda number, chunk: None
    one = function
    try:
        inspect.signature(function).bind(0, 0)
    except (TypeError, ValueError):  # it takes one; it is written in C and does not say
        return lambda number, chunk: one(number)
    return function


def no_sync_of(chunks: Sequence[nn.Module], config: Any) -> list[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """What holds reductions back, for each chunk: the config's hook (or list of hooks), else the wrapper's own method,
    else nothing. One hook for several chunks is entered once."""
    given = config.no_sync_func
    if given is None:
        return [getattr(chunk, "no_sync", None) or contextlib.nullcontext for chunk in chunks]
    if isinstance(given, list | tuple):
        if len(given) != len(chunks):
            raise UserError(f"config.no_sync_func has {len(given)} entries for {len(chunks)} model chunks")
        return list(given)
    return [given] + [contextlib.nullcontext] * (len(chunks) - 1)


def of_chunk(hooks: Any, chunk: int) -> Callable[..., Any] | None:
    """A chunk's own hook, of a list of them or of one for all."""
    return hooks[chunk] if isinstance(hooks, list | tuple) else hooks


def method_of(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """A method of the model or of what it wraps; None where none has it."""
    inner: Any = model
    while inner is not None:
        if hasattr(inner, name):
            return getattr(inner, name)
        inner = getattr(inner, "module", None)
    return None


def set_input_of(model: nn.Module) -> Callable[[Tensor], None]:
    """The method by which a stage is given its input. Raises UserError where there is none."""
    found = method_of(model, "set_input_tensor")
    if found is None:
        raise UserError(f"{type(model).__name__} is a pipeline stage and has no set_input_tensor(hidden states)")
    return found


def takes(function: Callable[..., Any], name: str) -> bool:
    """The function has a parameter of this name, or takes any."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def device_of(chunks: Sequence[nn.Module]) -> torch.device:
    """Where hidden states live: with the parameters of this rank's chunks, or, if they have none, where their buffers
    would be: on this process's GPU, if torch.distributed communicates between GPUs."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            return parameter.device
    on_gpus = dist.is_initialized() and "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
