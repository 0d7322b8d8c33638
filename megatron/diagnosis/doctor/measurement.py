"""--measure: rates of products, attention and copies of each rank, and of the links between ranks."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron.core.communication.collectives import all_gather, barrier, start_exchange

_SECONDS_OF_PRODUCTS = 2.0
"""On a GPU: it is at its power limit after about one."""
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Rates:
    """What a rank measured. Rates are floating point operations or bytes a second; None: not measured."""

    products: float
    """Large matrix products: bfloat16 on a GPU, float32 on a CPU."""
    copy: float
    """Bytes read and written by a copy in memory."""
    attention_64: float | None = None
    attention_128: float | None = None
    """Causal attention, forward and backward, as `megatron.diagnosis.planning.gpus.Gpu` defines them."""


def measure_rank(device: torch.device) -> Rates:
    """Measures this rank's device. All ranks measure at the same time, as in a run."""
    if device.type != "cuda":
        return Rates(_products(device, 768, torch.float32, 0.3), _copy(device, 64 << 20, 0.2))
    return Rates(
        _products(device, 8192, torch.bfloat16, _SECONDS_OF_PRODUCTS),
        _copy(device, 1 << 30, 0.5),
        _attention(device, 4096, 64),
        _attention(device, 8192, 128),
    )


def _products(device: torch.device, size: int, dtype: torch.dtype, seconds: float) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    return 2.0 * size**3 / _seconds_of(lambda: torch.matmul(left, right, out=out), device, seconds)


def _copy(device: torch.device, nbytes: int, seconds: float) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * nbytes / _seconds_of(lambda: target.copy_(source), device, seconds)


def _attention(device: torch.device, length: int, width: int) -> float:
    heads, batch = 4096 // width, 4
    shape = (batch, heads, length, width)
    queries, keys, values, gradient = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    for tensor in (queries, keys, values):
        tensor.requires_grad_()

    def step() -> None:
        with sdpa_kernel(_KERNELS, set_priority=True):
            out = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        torch.autograd.grad(out, (queries, keys, values), gradient)

    forward = 2.0 * batch * heads * length * length / 2 * 2 * width  # a query sees half of the keys, on average
    return 3.5 * forward / _seconds_of(step, device, 0.5)


def _seconds_of(step: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Returns the time of a call, from the later half of `seconds` of calls. All ranks call for the same time, so that
    those that share something slow each other down, as in a run."""
    step()
    _wait(device)
    began = time.perf_counter()
    step()
    _wait(device)
    count = max(1, int(seconds / 8 / max(time.perf_counter() - began, 1e-6)))
    end = began + seconds
    found: list[float] = []
    while not found or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(count):
            step()
        _wait(device)
        found.append((time.perf_counter() - began) / count)
    return statistics.mean(found[len(found) // 2 :])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pairs_of(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Yields two rounds of pairs that together make a ring of all ranks: (0, 1), (2, 3), ... and (1, 2), (3, 4), ..."""
    yield [(first, first + 1) for first in range(0, ranks - 1, 2)]
    if ranks > 2:
        yield [(first, (first + 1) % ranks) for first in range(1, ranks, 2) if (first + 1) % ranks != first - 1]


def measure_links(device: torch.device) -> dict[tuple[int, int], float]:
    """Returns the bytes a second that this rank sends while it receives as many, by pair of ranks. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nbytes = 256 << 20 if device.type == "cuda" else 4 << 20
    out, arriving = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    found = {}
    for pairs in pairs_of(ranks):
        mine = next((pair for pair in pairs if rank in pair), None)
        barrier()
        if mine is not None:
            peer = mine[0] if rank == mine[1] else mine[1]
            start_exchange(out, peer, arriving, peer, dist.group.WORLD).wait()
            _wait(device)
            began = time.perf_counter()
            for _ in range(4):
                start_exchange(out, peer, arriving, peer, dist.group.WORLD).wait()
            _wait(device)
            found[mine] = 4 * nbytes / (time.perf_counter() - began)
    return found


def measure_collectives(device: torch.device) -> float:
    """Returns the bytes a second that this rank sends in an all-gather of all ranks. Collective."""
    ranks = dist.get_world_size()
    tensor = torch.ones((64 << 20 if device.type == "cuda" else 1 << 20), dtype=torch.uint8, device=device)
    all_gather(tensor, dist.group.WORLD)
    _wait(device)
    barrier()
    began = time.perf_counter()
    for _ in range(4):
        all_gather(tensor, dist.group.WORLD)
    _wait(device)
    return 4 * tensor.numel() * (ranks - 1) / (time.perf_counter() - began)
