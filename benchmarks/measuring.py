"""What measuring programs share: options, timed calls, operations beside their definitions, a run after one step."""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.backends import LOCAL, Backend, triton_backend
from megatron.core.utils.torch_private import sleep_on_gpu
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import process_environment
from megatron.training.launch.signals import SignalWatch
from megatron.training.loop import train_step
from megatron.training.providers import Providers
from megatron.training.setup.set_up import set_up
from megatron.training.trainer import Trainer


def parser_of(about: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Returns a parser that prints `about` as its help, with an option of each name for a whole number."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="(default: %(default)s)")
    return parser


def elapsed(run: Callable[[], object], device: torch.device, count: int = 1, *, ahead: bool = False) -> float:
    """Returns the seconds of `count` calls, back to back. `ahead`: the launches of the host are ahead of the GPU."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(count):
            run()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead:
        sleep_on_gpu(1_000_000)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Returns the median time of a call, in seconds."""
    for _ in range(3):
        run()
    return statistics.median(elapsed(run, device, ahead=True) for _ in range(repeats))


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """Returns the replay of a CUDA graph of the call, which leaves out the time of the host."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()  # compiles and tunes kernels, which a graph cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def ceilings(device: torch.device, dtype: torch.dtype, size: int) -> tuple[float, float]:
    """Returns the FLOP/s of a large product, and the bytes per second (read and written) of a copy."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    rate = 2.0 * size**3 / seconds(lambda: a @ a, 10, device)
    b = torch.empty_like(a)
    return rate, 2.0 * a.numel() * a.element_size() / seconds(lambda: b.copy_(a), 10, device)


@dataclass(frozen=True)
class Operation:
    """An operation to time, with its number of floating-point operations and of bytes moved."""

    name: str
    run: Callable[[], object]
    flops: float = 0.0
    nbytes: float = 0.0


class Operations:
    """Operations of one backend on random data."""

    def __init__(self, backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
        self.backend, self.device, self.dtype = backend, device, dtype
        self.found: list[Operation] = []
        torch.manual_seed(0)

    def values(self, *shape: int) -> Tensor:
        """Returns random numbers of a shape, which need a gradient."""
        return torch.randn(shape, device=self.device, dtype=self.dtype).requires_grad_()

    def both(
        self,
        name: str,
        call: Callable[[], Tensor],
        leaves: list[Tensor],
        forward: float,
        backward: float,
        flops: float = 0.0,
    ) -> None:
        """Adds an operation and its backward. `forward` and `backward` are the smallest numbers of bytes that each must
        move; `flops` are those of forward."""
        output = call()
        gradient = torch.randn_like(output)

        def pull() -> object:
            return torch.autograd.grad(output, leaves, gradient, retain_graph=True, allow_unused=True)

        self.found.append(Operation(f"{name}, forward", call, flops, forward))
        self.found.append(Operation(f"{name}, backward", pull, 2.0 * flops, backward))


def print_comparison(
    about: str, limit: str, size: int, build: Callable[[Backend, torch.device, torch.dtype], Operations], repeats: int
) -> None:
    """Prints the times of operations in plain torch and in our kernels, and the share of the hardware's limit: a
    product of two matrices of `size`, or a copy of one. On a CPU both are plain torch."""
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    rate, copy = ceilings(device, dtype, size if on_gpu else 256)
    title = f"{about}{dtype} on {device.type}"
    print(f"{title}: product {rate / 1e12:.3g} TFLOP/s, copy {copy / 1e12:.3g} TB/s")
    print(f"{'operation':32} {'plain (ms)':>12} {'ours (ms)':>12} {limit:>12}")
    plain = {each.name: seconds(each.run, repeats, device) for each in build(LOCAL, device, dtype).found}
    for each in build((triton_backend() if on_gpu else None) or LOCAL, device, dtype).found:
        ours, best = seconds(each.run, repeats, device), each.flops / rate + each.nbytes / copy
        share = f"{best / ours:12.0%}" if best else ""
        print(f"{each.name:32} {plain[each.name] * 1e3:12.3f} {ours * 1e3:12.3f} {share}".rstrip())


@contextlib.contextmanager
def after_one_step(config: PretrainConfig, providers: Providers) -> Iterator[Trainer]:
    """Context: a run that has trained for one step."""
    with SignalWatch([]) as signals, process_environment(config) as environment:
        trainer = set_up(config, providers, environment, signals, time.monotonic())
        trainer.log.start(0)
        trainer.record_step(train_step(trainer))
        yield trainer
        trainer.close()
