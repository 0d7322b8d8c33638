"""Lets tensors on the meta device go the way of tensors on a GPU, on a machine without one.

The host code of each kernel allocates its results and decides what is kept for backward. It runs as it is; only the
launch of the kernel is left out. So a kernel says itself, beside its maths, how much memory it takes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from megatron.core.ops.attention import unfused
from megatron.core.ops.fp8 import cublaslt
from megatron.core.utils import recomputed
from megatron.core.utils.torch_private import cudnn_attention_forward, run_backward_within, storage_address

CountsOnHost = Callable[[Tensor], Tensor]
"""Returns the values of a tensor of counts that the host reads, such as the rows of each expert."""


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that decide which kernels compute."""

    capability: tuple[int, int] = (9, 0)
    multi_processor_count: int = 132
    shared_memory_per_block_optin: int = 232448


HOPPER = Gpu()


@contextlib.contextmanager
def as_on_gpu(counts: CountsOnHost, gpu: Gpu = HOPPER) -> Iterator[None]:
    """Inside the context, tensors on the meta device say that they are on a GPU, kernels are not launched, and torch
    answers questions about its GPU with `gpu`. For one thread at a time."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(gpu):
            stack.enter_context(_replaced(owner, name, value))
        mode = _MetaAsCuda(counts)
        stack.enter_context(run_backward_within(mode))
        stack.enter_context(mode)
        yield


def _replacements(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    yield torch.cuda, "get_device_capability", lambda *device: gpu.capability
    yield torch.cuda, "get_device_properties", lambda *device: gpu
    yield torch.cuda, "current_device", lambda: 0
    yield torch.cuda, "Stream", _Stream
    yield torch.cuda, "Event", _Event
    yield torch.cuda, "current_stream", _Stream
    yield torch.cuda, "stream", contextlib.nullcontext
    yield torch.UntypedStorage, "data_ptr", storage_address
    # torch's check would compare devices as hooks inside and outside of an operation see them.
    for module in (recomputed, unfused):
        yield module, "checkpoint", functools.partial(checkpoint, determinism_check="none")
    yield cublaslt, "is_available", lambda: True
    yield cublaslt, "accumulate_product", lambda *operands: True
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    for kernel in (JITFunction, InterpretedFunction):
        yield kernel, "__getitem__", lambda self, grid: _launch_nothing


class _Event:
    """Stands for an event of a stream."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""


class _Stream:
    """Stands for a stream."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.device = device

    def wait_stream(self, stream: Any) -> None:
        """Does nothing."""

    def wait_event(self, event: Any) -> None:
        """Does nothing."""

    def record_event(self, event: Any = None) -> _Event:
        """Returns an event."""
        return event or _Event()

    def synchronize(self) -> None:
        """Does nothing."""


def _launch_nothing(*arguments: Any, **options: Any) -> None:
    """Stands for the launch of a kernel."""


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    own = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


_CUDA, _META = torch.device("cuda", 0), torch.device("meta")


class _MetaAsCuda(TorchFunctionMode):
    def __init__(self, counts: CountsOnHost) -> None:
        super().__init__()
        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.is_cuda.__get__: lambda tensor: tensor.is_meta or tensor.is_cuda,
            Tensor.device.__get__: lambda tensor: _CUDA if tensor.is_meta else tensor.device,
            Tensor.cpu: lambda tensor: counts(tensor) if tensor.is_meta else tensor.cpu(),
            Tensor.tolist: lambda tensor: (counts(tensor) if tensor.is_meta else tensor).tolist(),
            Tensor.item: lambda tensor: (counts(tensor) if tensor.is_meta else tensor).item(),
            Tensor.__bool__: lambda tensor: tensor.is_meta or bool(tensor),  # as in later steps: fp8 has a history
            Tensor.data_ptr: _address,
            Tensor.copy_: lambda target, source, *options, **more: target,
            F.scaled_dot_product_attention: self._sdpa,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answers for a tensor on the meta device, or calls the function with meta in place of a GPU."""
        kwargs = dict(kwargs or {})
        answer = self._answers.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _META
        return func(*(_META if isinstance(own, torch.device) and own.type == "cuda" else own for own in args), **kwargs)

    def _sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Computes SDPA by the kernel of cuDNN, which comes first on a GPU. It keeps queries, keys, values, the result
        and a float32 for each query and head."""
        causal, scale = options.get("is_causal", False), options.get("scale")
        result, *_ = cudnn_attention_forward(query, key, value, attn_mask, True, 0.0, causal, False, scale=scale)
        return result


def _address(tensor: Tensor) -> int:
    """Returns an address that tensors of one storage share, as far as they do."""
    return storage_address(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()
