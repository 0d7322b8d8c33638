"""Our kernels allocate the same on the meta device, where they are not launched, as in Triton's interpreter."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.backends import triton_backend
from megatron.core.ops.records import ByDevice
from megatron.core.ops.split_columns import split_columns
from megatron.core.utils.offloaded import Offloaded, OffloadLimits
from megatron.diagnosis.memory.allocations import Allocations
from megatron.diagnosis.memory.as_on_gpu import Gpu, as_on_gpu

BACKEND = triton_backend()
assert BACKEND is not None
OF_TWO = Gpu(multi_processor_count=2)  # as many as kernels assume in the interpreter
T, H, V = 8, 32, 40


def kernel(record: str, name: str) -> Callable[..., Any]:
    """The function for GPUs of an operation."""
    found = getattr(getattr(BACKEND, record), name)
    return found.cuda if isinstance(found, ByDevice) else found


def _of(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.ones(shape, dtype=dtype, device=device)
    return values.requires_grad_() if dtype.is_floating_point else values


def norm(device: str) -> Tensor:
    normed, residual = kernel("norms", "rms_norm_with_residual")(_of(device, T, H), _of(device, H), 1e-5)
    return normed + residual


def layer_norm(device: str) -> Tensor:
    return kernel("norms", "layer_norm")(_of(device, T, H), _of(device, H), _of(device, H), 1e-5)


def linear(device: str) -> Tensor:
    return kernel("matrices", "linear")(_of(device, T, H), _of(device, V, H), _of(device, V))


def losses(device: str) -> Tensor:
    labels = torch.zeros(T, dtype=torch.int64, device=device)
    return kernel("losses", "cross_entropy")(_of(device, T, V) * 1.0, labels, V - 1)


def head(device: str) -> Tensor:
    labels = torch.zeros(T, dtype=torch.int64, device=device)
    return kernel("losses", "head_loss")(_of(device, T, H), _of(device, V, H), None, labels, V)


def embedding(device: str) -> Tensor:
    return kernel("matrices", "embedding")(torch.zeros(T, dtype=torch.int64, device=device), _of(device, V, H))


def gated_norm(device: str) -> Tensor:
    return kernel("recurrence", "gated_rms_norm")(
        _of(device, T, 1, 2, H), _of(device, T, 1, 2, H), _of(device, H), 1e-5, False
    )


def columns(device: str) -> Tensor:
    """A part whose gradient is written where it belongs, and one whose gradient is copied."""
    gate, other = split_columns(_of(device, T, 1, 1, H) * 1.0, (8, 24))
    inputs, weight = _of(device, T, 1, 1, 8), _of(device, 8)
    return kernel("recurrence", "gated_rms_norm")(inputs, gate, weight, 1e-5, False) + other[..., :8]


def output_gate(device: str) -> Tensor:
    _, gate = split_columns(_of(device, T, 1, 2, H) * 1.0, (8, 24))
    return kernel("attention", "gate_output")(_of(device, T, 1, 48), gate)


def shared_experts(device: str) -> Tensor:
    hidden = _of(device, T, H) * 1.0
    read = kernel("experts", "read_input")(hidden, _of(device, 1, H))
    routed, shared = read.for_router * read.for_dispatch, read.for_shared * 2.0
    return kernel("experts", "add_shared")(routed, shared, read.gate_logits, hidden)


def router(device: str) -> Tensor:
    return kernel("experts", "router_logits")(_of(device, T, H), _of(device, V, H), None, torch.float32)


KERNELS = [
    norm,
    layer_norm,
    linear,
    losses,
    head,
    embedding,
    gated_norm,
    columns,
    output_gate,
    shared_experts,
    router,
]


def counted(run: Callable[[str], Tensor], device: str) -> tuple[int, int, int]:
    """Bytes kept after a forward, at its peak, and after backward. The interpreter's launches leave reference cycles,
    which a GPU's do not."""
    allocations = Allocations(1, device)
    with contextlib.ExitStack() as stack:
        if device == "meta":
            stack.enter_context(as_on_gpu(lambda tensor: tensor, OF_TWO, device="cpu"))
        run(device)  # fills caches
        with allocations:
            result = run(device)
            forward = allocations.peak
            gc.collect()
            kept = allocations.live
            result.sum().backward()
            del result
            gc.collect()
    return kept, forward, allocations.live


@pytest.mark.parametrize("run", KERNELS, ids=lambda run: run.__name__)
def test_a_kernel_allocates_the_same(run: Callable[[str], Tensor]) -> None:
    meta = counted(run, "meta")
    assert meta == counted(run, "cpu")
    assert meta[1] >= meta[0] > 0


def test_a_kernel_that_keeps_more_is_seen() -> None:
    def keeps_more(device: str) -> Tensor:
        return norm(device) * 2.0 if device == "meta" else norm(device) * _of(device, T, H)

    assert counted(keeps_more, "meta") != counted(keeps_more, "cpu")


def test_what_functions_of_torch_save_is_offloaded() -> None:
    layers = [torch.nn.Identity() for _ in range(3)]
    run = Offloaded(lambda layers, values: values.exp(), layers[0], OffloadLimits(), moves_all=lambda layer: True)
    with as_on_gpu(lambda tensor: tensor), Allocations(1) as allocations:
        values = _of("cuda", T, H)
        before = allocations.live
        for layer in layers:
            values = run([layer], values)
        assert allocations.live - before == 4 * T * H  # the output alone: the other two that exp saved are on the host
        values.sum().backward()


def test_other_threads_and_later_code_see_the_machine() -> None:
    before = torch.cuda.get_device_capability, torch.cuda.Stream, torch.UntypedStorage.data_ptr
    storage = torch.ones(2).untyped_storage()
    address = storage.data_ptr()
    with as_on_gpu(lambda tensor: tensor):
        tensor = torch.empty(4, device="cuda")
        assert tensor.is_cuda and tensor.device.type == "cuda" and tensor.is_meta
        assert torch.cuda.get_device_capability() == (9, 0) and storage.data_ptr() == address
        assert tensor[1:].data_ptr() == tensor.data_ptr() + 4
    assert not tensor.is_cuda and tensor.device.type == "meta"
    assert before == (torch.cuda.get_device_capability, torch.cuda.Stream, torch.UntypedStorage.data_ptr)
