"""Measures the operations of an expert layer:   python benchmarks/measure_experts.py --tokens 16384 --experts 64

Times each operation of this library on a GPU, forward and backward, and its definition in plain torch, with uniform or
skewed routing. The last column is the share of the hardware's limit: the rate of a large matrix product, or of a device
copy. On a CPU it times only the definitions.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.backends import LOCAL, Backend, triton_backend
from megatron.core.ops.activation import Activation
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.utils.torch_private import sleep_on_gpu


@dataclass(frozen=True)
class Sizes:
    """Sizes of an expert layer. Expert i is chosen with a probability proportional to i^-skew."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    skew: float

    @property
    def rows(self) -> int:
        """Copies of tokens that the experts compute."""
        return self.tokens * self.topk


@dataclass(frozen=True)
class Operation:
    """An operation to time, with its number of floating-point operations and of bytes moved."""

    name: str
    run: Callable[[], object]
    flops: float = 0.0
    nbytes: float = 0.0


class PlainMainGrad:
    """Accumulates weight gradients as a training run does."""

    defers_weight_grad = False

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def add_grouped_product(self, dy: Tensor, x: Tensor, accumulate: Callable[..., None]) -> None:
        """Adds dy^T x of each group to the total."""
        accumulate(self.total, dy, x)


def operations(sizes: Sizes, backend: Backend, device: torch.device, dtype: torch.dtype) -> list[Operation]:
    """Returns the operations of one layer on one rank, with separate entries for forward and backward."""
    torch.manual_seed(0)
    popularity = torch.arange(1, sizes.experts + 1, device=device).pow(-sizes.skew).expand(sizes.tokens, -1)
    numbers = popularity.multinomial(sizes.topk)
    counts = torch.bincount(numbers.flatten(), minlength=sizes.experts)
    groups = RowGroups(counts, counts.tolist())
    copies, _ = backend.number_choices(numbers, sizes.experts).copies(sizes.rows)
    hidden = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=dtype).requires_grad_()
    rows = torch.randn(sizes.rows, sizes.hidden, device=device, dtype=dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(sizes.experts, 2 * sizes.ffn, sizes.hidden, device=device, dtype=dtype) * 0.02)
    weight.main_grad_accumulator = PlainMainGrad(torch.zeros(weight.shape, device=device))  # type: ignore[attr-defined]
    product = torch.randn(sizes.rows, 2 * sizes.ffn, device=device, dtype=dtype).requires_grad_()
    gates = torch.rand(sizes.rows, device=device).requires_grad_()
    swiglu = Activation(F.silu, gated=True)
    flops = 2.0 * sizes.rows * sizes.hidden * 2 * sizes.ffn
    row_bytes = float(sizes.rows * sizes.hidden * hidden.element_size())
    token_bytes = float(sizes.tokens * sizes.hidden * hidden.element_size())
    inner_bytes = float(sizes.rows * sizes.ffn * hidden.element_size())
    sort = lambda: backend.number_choices(numbers, sizes.experts).copies(sizes.rows)  # noqa: E731
    found = [Operation("sort by expert", sort)]
    moved = row_bytes + token_bytes

    def both(name: str, call: Callable[[], Tensor], leaves: list[Tensor], flops: float, *nbytes: float) -> None:
        output = call()
        gradient = torch.randn_like(output)

        def backward() -> object:
            return torch.autograd.grad(output, leaves, gradient, retain_graph=True, allow_unused=True)

        found.append(Operation(f"{name}, forward", call, flops, nbytes[0]))
        found.append(Operation(f"{name}, backward", backward, 2.0 * flops, nbytes[1]))

    both("permute", lambda: backend.permute(hidden, copies), [hidden], 0.0, moved, moved)
    both("unpermute", lambda: backend.unpermute(rows, copies), [rows], 0.0, moved, moved)
    both("grouped linear", lambda: backend.grouped_linear(rows, weight, groups), [rows, weight], flops, 0.0, 0.0)
    activate = lambda: backend.weighted_activation(product, None, gates, swiglu)  # noqa: E731
    both("weighted activation", activate, [product, gates], 0.0, 3.0 * inner_bytes, 5.0 * inner_bytes)
    return found


def seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Returns the median time of a call, in seconds."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            sleep_on_gpu(1_000_000)  # keeps the launches of the host ahead of the device
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def ceilings(device: torch.device, dtype: torch.dtype, size: int) -> tuple[float, float]:
    """Returns the FLOP/s of a large product, and the bytes per second (read and written) of a copy."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    rate = 2.0 * size**3 / seconds(lambda: a @ a, 10, device)
    b = torch.empty_like(a)
    return rate, 2.0 * a.numel() * a.element_size() / seconds(lambda: b.copy_(a), 10, device)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 16384), ("hidden", 2048), ("ffn", 1024), ("experts", 64), ("topk", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{name} of the layer")
    parser.add_argument(
        "--skew", type=float, default=0.0, help="expert i is chosen in proportion to i^-skew; 0: uniform"
    )
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="number of timed calls")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = Sizes(args.tokens, args.hidden, args.ffn, args.experts, args.topk, args.skew)
    rate, copy = ceilings(device, dtype, 8192 if device.type == "cuda" else 256)
    print(f"{sizes}, {dtype} on {device.type}: product {rate / 1e12:.3g} TFLOP/s, copy {copy / 1e12:.3g} TB/s")
    kernels = triton_backend() if device.type == "cuda" else None
    ours = operations(sizes, kernels or LOCAL, device, dtype)
    print(f"{'operation':32} {'plain (ms)':>12} {'ours (ms)':>12} {'of limit':>12}")
    for plain, fast in zip(operations(sizes, LOCAL, device, dtype), ours, strict=True):
        times = [seconds(operation.run, args.repeats, device) for operation in (plain, fast)]
        best = fast.flops / rate + fast.nbytes / copy
        share = f"{best / times[1]:12.0%}" if best else ""
        print(f"{fast.name:32} {times[0] * 1e3:12.3f} {times[1] * 1e3:12.3f} {share}".rstrip())
    return 0


if __name__ == "__main__":
    run_main(main)
