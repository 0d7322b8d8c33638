"""Optional hooks of a config and optional methods of a model chunk that the runner calls."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.micro_batch import MicroBatch
from megatron.core.utils.keywords import Keywords

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def no_sync_contexts(
    chunks: Sequence[nn.Module], config: "TransformerConfig"
) -> list[Callable[[], contextlib.AbstractContextManager[object]]]:
    """Returns, for each chunk, the context manager that delays its gradient reductions: `config.no_sync_func` (one, or
    a list with one for each chunk), else the wrapper's own `no_sync`, else an empty context. A single hook for several
    chunks is entered once. Raises UserError if the list has another length than `chunks`."""
    given = config.no_sync_func
    if given is None:
        return [getattr(chunk, "no_sync", None) or contextlib.nullcontext for chunk in chunks]
    if isinstance(given, list | tuple):
        if len(given) != len(chunks):
            raise UserError(f"config.no_sync_func has {len(given)} entries for {len(chunks)} model chunks")
        return list(given)
    return [given] + [contextlib.nullcontext] * (len(chunks) - 1)


def hook_of_chunk(hooks: Any, chunk: int) -> Callable[..., Any] | None:
    """Returns the hook of a chunk, from a list with one for each chunk or from a single hook for all."""
    return hooks[chunk] if isinstance(hooks, list | tuple) else hooks


def find_method(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """Returns a method of the model or of the module that it wraps; None if neither has it."""
    inner: Any = model
    while inner is not None:
        if hasattr(inner, name):
            return getattr(inner, name)
        inner = getattr(inner, "module", None)
    return None


def input_setter(model: nn.Module) -> Callable[[Tensor], None]:
    """Returns the method that sets the input of a stage. Raises UserError if the model has none."""
    found = find_method(model, "set_input_tensor")
    if found is None:
        raise UserError(f"{type(model).__name__} is a pipeline stage and has no set_input_tensor(hidden states)")
    return found


def micro_batch_receiver(model: nn.Module) -> nn.Module | None:
    """Returns the model, or the module that it wraps, whose forward takes `micro_batch`; None if there is none.

    Raises UserError for a forward that overrides one with `micro_batch` and does not take it itself.
    """
    inner: Any = model
    while inner is not None:
        module = getattr(inner, "_orig_mod", inner)  # torch.compile's wrapper hands keywords on
        if any(_declares_micro_batch(base) for base in type(module).__mro__):
            if "micro_batch" not in Keywords.of(module.forward):
                raise UserError(
                    f"{type(module).__name__}.forward does not take `micro_batch`, and the forward that it overrides "
                    "does: take it and hand it on; it holds the position for random numbers and the loss scale"
                )
            return inner
        inner = getattr(inner, "module", None)
    return None


@functools.cache
def _declares_micro_batch(base: type) -> bool:
    forward = vars(base).get("forward")
    return forward is not None and "micro_batch" in Keywords.of(forward).names


@contextlib.contextmanager
def supply_micro_batch(receiver: nn.Module | None, micro_batch: MicroBatch) -> Iterator[None]:
    """Passes the record as keyword `micro_batch` to every call of `receiver` inside, unless the caller passes one
    itself.

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


def device_of(chunks: Sequence[nn.Module]) -> torch.device:
    """Returns the device of hidden states, which is the device of the chunks' parameters. For chunks without parameters
    it is this process's GPU if torch.distributed communicates between GPUs, else the CPU."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            return parameter.device
    on_gpus = dist.is_initialized() and "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
