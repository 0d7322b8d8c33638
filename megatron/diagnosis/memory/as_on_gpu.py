"""Lets tensors on the meta device go the way of tensors on a GPU, on a machine without one.

The host code of each kernel allocates its results and decides what is kept for backward. It runs as it is; only the
launch of the kernel is left out. So a kernel says itself, beside its maths, how much memory it takes.
"""

import contextlib
import functools
import threading
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
from megatron.core.utils.offloaded import OffloadRegion
from megatron.core.utils.torch_private import (
    cudnn_attention_forward,
    flash_attention_for_cpu,
    run_backward_within,
    storage_address,
)

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
def as_on_gpu(counts: CountsOnHost, gpu: Gpu = HOPPER, device: str = "cuda") -> Iterator[None]:
    """Inside the context, tensors on the meta device say that they are on a GPU, kernels are not launched, and torch
    answers questions about its GPU with `gpu`. This holds for the calling thread. With `device` cpu they say that they
    are on a CPU, where tests can compare with real tensors."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(gpu):
            stack.enter_context(_replaced(owner, name, value))
        mode = _MetaAs(torch.device(device, 0) if device == "cuda" else torch.device(device), counts)
        stack.enter_context(_replaced(OffloadRegion, "keep", _within(mode, OffloadRegion.keep)))
        stack.enter_context(run_backward_within(mode))
        stack.enter_context(mode)
        if device == "cpu":
            stack.enter_context(_META)  # for tensors that are created without a device
        yield


def _replacements(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    yield torch.cuda, "get_device_capability", lambda *device: gpu.capability
    yield torch.cuda, "get_device_properties", lambda *device: gpu
    yield torch.cuda, "current_device", lambda: 0
    yield torch.cuda, "Stream", _Stream
    yield torch.cuda, "Event", _Event
    yield torch.cuda, "current_stream", _Stream
    yield torch.cuda, "stream", contextlib.nullcontext
    data_ptr = torch.UntypedStorage.data_ptr
    yield torch.UntypedStorage, "data_ptr", lambda own: storage_address(own) if _is_meta(own) else data_ptr(own)
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


def _is_meta(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "meta"


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

    def wait_stream(self, stream: object) -> None:
        """Does nothing."""

    def wait_event(self, event: object) -> None:
        """Does nothing."""

    def record_event(self, event: Any = None) -> _Event:
        """Returns an event."""
        return event or _Event()

    def synchronize(self) -> None:
        """Does nothing."""


def _within(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is called inside the mode. Hooks for tensors that a function of torch saves run while
    that function has left the mode, and would see them on the meta device."""

    def inside(*arguments: object) -> Any:
        with mode:
            return function(*arguments)

    return inside


def _launch_nothing(*arguments: object, **options: object) -> None:
    """Stands for the launch of a kernel."""


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function for this thread. Others, such as a writer of checkpoints, call it as before."""
    own, is_inherited, thread = getattr(owner, name), name not in vars(owner), threading.get_ident()

    @functools.wraps(own)
    def chosen(*arguments: object, **options: object) -> Any:
        return (value if threading.get_ident() == thread else own)(*arguments, **options)

    setattr(owner, name, chosen)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


_META = torch.device("meta")


class _MetaAs(TorchFunctionMode):
    def __init__(self, device: torch.device, counts: CountsOnHost) -> None:
        super().__init__()
        self.device, is_cuda = device, device.type == "cuda"
        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.is_cuda.__get__: lambda own: is_cuda if own.is_meta else own.is_cuda,  # type: ignore[attr-defined]
            Tensor.device.__get__: lambda tensor: device if tensor.is_meta else tensor.device,
            Tensor.cpu: lambda tensor: counts(tensor) if tensor.is_meta else tensor.cpu(),
            Tensor.tolist: lambda tensor: (counts(tensor) if tensor.is_meta else tensor).tolist(),
            Tensor.item: lambda tensor: (counts(tensor) if tensor.is_meta else tensor).item(),
            Tensor.__bool__: lambda tensor: tensor.is_meta or bool(tensor),  # as in later steps: fp8 has a history
            Tensor.data_ptr: _address,
            Tensor.copy_: _copy,
            F.scaled_dot_product_attention: self._sdpa,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Answers for a tensor on the meta device, or calls the function with meta in place of a GPU."""
        kwargs = dict(kwargs or {})
        answer = self._answers.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        if func in (torch.mm, torch.addmm) and kwargs.get("out_dtype") is not None:
            return _wider_product(args[-2], args[-1], kwargs["out_dtype"], kwargs.get("out"))
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = self._real(kwargs["device"])
        return func(*map(self._argument, args), **kwargs)

    def _argument(self, own: object) -> object:
        """Returns an argument of a function of torch, on the meta device."""
        if isinstance(own, Tensor) and self.device.type == "cpu" and not own.is_meta:
            return own.to(_META)  # constants of modules
        return self._real(own) if isinstance(own, torch.device) else own

    def _real(self, device: Any) -> object:
        """Returns meta in place of the device that tensors seem to be on."""
        return _META if device is not None and torch.device(device).type == self.device.type else device

    def _sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: object
    ) -> Tensor:
        """Computes SDPA by the kernel of cuDNN, which comes first on a GPU. It keeps queries, keys, values, the result
        and a float32 for each query and head."""
        causal, scale = options.get("is_causal", False), options.get("scale")
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = attn_mask.to(query.dtype)  # torch makes it a summand of the scores
        if self.device.type == "cpu":
            return flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=attn_mask, scale=scale)[0]
        result, *_ = cudnn_attention_forward(query, key, value, attn_mask, True, 0.0, causal, False, scale=scale)
        return result


def _copy(target: Tensor, source: Tensor, *options: Any, **more: Any) -> Tensor:
    """Copies between tensors on one device. To and from the host there are no values to copy."""
    return target.copy_(source, *options, **more) if target.is_meta == source.is_meta else target


def _wider_product(left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Returns the result of a product in another type, which the meta device of torch 2.11 cannot make."""
    return left.new_empty(left.shape[0], right.shape[1], dtype=dtype) if out is None else out


def _address(tensor: Tensor) -> int:
    """Returns an address that tensors of one storage share, as far as they do."""
    return storage_address(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()
