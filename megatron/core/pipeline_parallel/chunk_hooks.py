"""What a config and a model chunk may bring along: hooks around micro-batches and reductions, optional methods."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.micro_batch import MicroBatch


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


def micro_batch_receiver(model: nn.Module) -> nn.Module | None:
    """The model, or the module that it wraps, whose forward takes `micro_batch`; None if there is none.

    Raises UserError for a forward that overrides one with `micro_batch` and does not take it itself.
    """
    inner: Any = model
    while inner is not None:
        module = getattr(inner, "_orig_mod", inner)  # torch.compile's wrapper hands keywords on
        if any(_declares_micro_batch(base) for base in type(module).__mro__):
            if not takes(module.forward, "micro_batch"):
                raise UserError(
                    f"{type(module).__name__}.forward does not take `micro_batch`, and the forward that it overrides "
                    "does: take it and hand it on; it holds the position for random numbers and the loss scale"
                )
            return inner
        inner = getattr(inner, "module", None)
    return None


def _declares_micro_batch(base: type) -> bool:
    forward = vars(base).get("forward")
    return forward is not None and "micro_batch" in inspect.signature(forward).parameters


@contextlib.contextmanager
def supply_micro_batch(receiver: nn.Module | None, micro_batch: MicroBatch) -> Iterator[None]:
    """Every call of `receiver` in here gets the record as keyword `micro_batch`, unless the caller passes one itself.

    A `forward_step(data_iterator, model)` of Megatron-LM's form knows nothing of the record; this adds it to its call.
    """

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {"micro_batch": micro_batch, **kwargs}

    handle = None if receiver is None else receiver.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


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
