"""The floor of a training step: the least time of its products, its attention and the bytes that it must move.

`measure_floor` times each distinct product and attention call that recorder.py recorded. It times each one alone,
on random data, long enough for the GPU to reach its power limit as in training. Attention to selected keys takes its
share of the time of attention to all keys. A device copy is timed too: its rate gives the time of memory-bound
operations. Scans of state space layers and scores of an indexer are not timed: they take as long as their FLOPs at the
rate of the fastest product of the step, or as their bytes at the rate of the copy (`recorder.Roofline`). `link_rates`
times large transfers between ranks. `benchmarks/bench.py CELL --floor` prints the result (benchmarks/bench_floor.py).
"""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.measuring import elapsed
from benchmarks.recorder import Attention, AttentionBlock, Recorder
from megatron.core import backends
from megatron.core.attention_plan import plan_attention
from megatron.core.backends import fp8_settings
from megatron.core.communication.collectives import group_rank, group_size, start_gather_rows
from megatron.core.communication.peer_memory import SymmetricMemory
from megatron.core.distributed.main_grad import accumulate_product
from megatron.core.exceptions import UserError
from megatron.core.ops.attention.kernels import Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.ops.fp8.block_recipes import build_scaling
from megatron.core.ops.fp8.quantize import Quantized
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit, Role, Scaling
from megatron.core.ops.linear import product
from megatron.diagnosis.planning.work import Product

PARTS = ("products", "casts to fp8", "attention", "state space", "memory-bound operations", "update of the weights")
"""The parts of a floor."""


@dataclass(frozen=True)
class Timed:
    """A part of the floor."""

    part: str
    name: str
    count: int
    """Number of runs in a step."""
    milliseconds: float
    """Time of one run."""
    flops: float = 0.0

    def describe(self) -> str:
        """Returns a line with the time in a step."""
        total, each = self.count * self.milliseconds, f"{self.count} times {self.name}: {self.milliseconds:.3f} ms"
        rate = f", {self.flops / self.milliseconds / 1e9:.0f} TFLOP/s" if self.flops else ""
        return f"{total:10.2f} ms  {each}{rate}"


class Clock:
    """Times operations on a device, each for `seconds`, back to back."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def milliseconds(self, run: Callable[[], object], agree: Callable[[int], int] = int) -> float:
        """Returns the mean time of a call, after calls that bring the GPU to the clock rate of this operation. If a
        call communicates, `agree` returns one number of calls for all ranks, given that of this rank."""
        self._time(run, 2)
        count = agree(max(3, min(5000, round(self.seconds * 1000 / max(self._time(run, 3), 1e-3)))))
        self._time(run, count // 3)
        return self._time(run, count)

    def _time(self, run: Callable[[], object], count: int) -> float:
        count = max(1, count)
        return elapsed(run, self.device, count) * 1000 / count

    def copy_rate(self) -> float:
        """Returns the bytes that a copy reads and writes in a millisecond."""
        size = 2**28 if self.device.type == "cuda" else 2**16
        source = torch.randn(size, device=self.device)
        target = torch.empty_like(source)
        return 2.0 * source.numel() * source.element_size() / self.milliseconds(lambda: target.copy_(source))


def measure_floor(seen: Recorder, config: Any, num_microbatches: int, update_bytes: int, clock: Clock) -> list[Timed]:
    """Returns the parts of the floor of a step of `num_microbatches`. `config` is the model's; the update of the
    weights moves `update_bytes`."""
    rate = clock.copy_rate()
    settings = fp8_settings(config, (config.num_layers + 1) // 2, backends.choose_backend(config).fp8_kernels)
    found, fastest = [], 0.0
    for each, count in seen.products.items():
        timed = _fp8_products(each, settings, clock) if each.fp8 else _products(each, clock)
        found += [
            Timed("products", f"{each.describe()}, {name}", count * num_microbatches, ms, each.flops)
            for name, ms in timed.items()
        ]
        if each.fp8:
            # Each matrix is read once and written in both layouts; weights once a step.
            tokens, weight = 4 * each.rows * (each.inputs + each.outputs), 4 * each.inputs * each.outputs * each.weights
            moved = tokens * num_microbatches + weight
            found.append(Timed("casts to fp8", each.describe(), count, moved / rate))
        else:
            fastest = max(fastest, each.flops / min(timed.values()))
    for other, count in seen.others.items():
        ms = max(other.flops / fastest, other.moved / rate)
        found.append(Timed(other.part, other.name, count * num_microbatches, ms, other.flops))
    for call, count in seen.attention.values():
        for name, ms, flops in _attention(call, config, clock):
            found.append(Timed("attention", name, count * num_microbatches // seen.attention_microbatches, ms, flops))
    for name, moved in seen.moved.most_common():
        found.append(Timed("memory-bound operations", name, num_microbatches, moved / rate))
    found.append(Timed("update of the weights", "norm of the gradient and update", 1, update_bytes / rate))
    return found


def _products(each: Product, clock: Clock) -> dict[str, float]:
    """Returns the milliseconds of a linear layer's three products."""
    x, weight, dy, total = _operands(each, clock)
    runs: dict[str, Callable[[], object]] = {"forward": lambda: product(x, weight.t())}
    if each.backward[0]:
        runs["input gradient"] = lambda: product(dy, weight)
    if each.backward[1]:
        runs["weight gradient"] = lambda: accumulate_product(total, dy, x)
    return {name: clock.milliseconds(run) for name, run in runs.items()}


def _operands(each: Product, clock: Clock) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns random inputs, weight and gradient of the outputs, and the gradient of the weight in float32."""
    shapes = ((each.rows, each.inputs), (each.outputs, each.inputs), (each.rows, each.outputs))
    x, weight, dy = (torch.randn(shape, device=clock.device, dtype=each.dtype) for shape in shapes)
    total = torch.zeros(shapes[1], device=clock.device, dtype=torch.promote_types(each.dtype, torch.float32))
    return x, weight, dy, total


def _fp8_products(each: Product, settings: Fp8Settings | None, clock: Clock) -> dict[str, float]:
    """Returns the milliseconds of the three products of a linear layer in fp8, whose matrices are already cast."""
    assert settings is not None
    x, weight, dy, total = _operands(each, clock)
    scaling, multiply = build_scaling(settings, LinearSplit(), clock.device), settings.kernels.product
    inputs, weights, gradients = (
        _both(scaling, matrix, role)
        for matrix, role in ((x, Role.INPUTS), (weight, Role.WEIGHTS), (dy, Role.GRADIENTS))
    )
    runs: dict[str, Callable[[], object]] = {
        "forward": lambda: multiply(inputs[0], weights[0], each.dtype, precise=False),
        "input gradient": lambda: multiply(gradients[0], weights[1], each.dtype),
        "weight gradient": (lambda: settings.kernels.accumulate_product(total, gradients[1], inputs[1]))
        if settings.wgrad
        else (lambda: accumulate_product(total, dy, x)),
    }
    return {name: clock.milliseconds(run) for name, run in runs.items()}


def _both(scaling: Scaling, matrix: Tensor, role: Role) -> tuple[Quantized, Quantized]:
    pair = scaling.quantize(matrix, role, rows=True, columns=True, records=False)
    assert pair.rows is not None and pair.columns is not None
    return pair.rows, pair.columns


def _attention(call: Attention | AttentionBlock, config: Any, clock: Clock) -> list[tuple[str, float, float]]:
    """Returns name, milliseconds and floating point operations of forward and backward."""
    share = 1.0
    if isinstance(call, Attention) and call.seen is not None:
        share = call.seen / call.pairs
        call = _to_all_keys(call, config, clock)
    (length, batch, heads, width), (keys, *_), (*_, value_width) = call.shapes
    block = f" and {keys} keys" if isinstance(call, AttentionBlock) else ""
    name = f"batch {batch}, {length} queries{block}, {heads} heads, {width} and {value_width} channels"
    forward, backward = _runs_of_block(call, clock) if isinstance(call, AttentionBlock) else _runs_of(call, clock)
    name += f", {share:.1%} of the keys" if share < 1 else ""
    return [
        (f"{name}, forward", share * clock.milliseconds(forward), call.flops),
        (f"{name}, backward", share * clock.milliseconds(backward), 2.5 * call.flops),  # it computes the scores again
    ]


def _to_all_keys(call: Attention, config: Any, clock: Clock) -> Attention:
    """Returns the call without its mask and causality, with the kernel that is then chosen: pairs are computed fastest
    where every query sees all keys."""
    variant = AttentionVariant(call.variant.scale, causal=False, widths=call.variant.widths)
    plan = plan_attention(backends.choose_backend(config), variant, config)
    kernel = plan.kernel_of(Situation(clock.device.type, call.dtype, False, False), AttentionCall(), call.shapes[0][0])
    return dataclasses.replace(call, compute=kernel.compute, variant=variant, call=AttentionCall())


def _runs_of(call: Attention, clock: Clock) -> tuple[Callable[[], object], Callable[[], object]]:
    query, key, value = (tensor.requires_grad_() for tensor in _inputs_of(call, clock))
    compute = partial(call.compute, query, key, value, call.variant, call.call)
    output = compute()
    gradient = torch.randn_like(output)
    return compute, partial(torch.autograd.grad, output, (query, key, value), gradient, retain_graph=True)


def _runs_of_block(call: AttentionBlock, clock: Clock) -> tuple[Callable[[], object], Callable[[], object]]:
    tensors, last = _inputs_of(call, clock), (call.offsets, call.variant, call.call)
    with torch.no_grad():
        output, lse = call.kernel.forward(*tensors, *last)
    gradient = torch.randn_like(output)
    return (
        lambda: call.kernel.forward(*tensors, *last),
        lambda: call.kernel.backward(gradient, *tensors, output, lse, *last),
    )


def _inputs_of(call: Attention | AttentionBlock, clock: Clock) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a random query, key and value."""
    query, key, value = (
        torch.empty_strided(shape, stride, device=clock.device, dtype=call.dtype).normal_()
        for shape, stride in zip(call.shapes, call.strides, strict=True)
    )
    return query, key, value


def link_rates(group: ProcessGroup, agree: Callable[[int], int], clock: Clock) -> dict[str, float]:
    """Returns the bytes that this rank sends in a millisecond while all ranks of the group send and receive: in a large
    all_gather, and with copy engines if the ranks are GPUs that can share memory. All ranks call this together. `agree`
    returns the largest number of all ranks, given that of this rank."""
    ranks, rank = group_size(group), group_rank(group)
    part = (2**30 if clock.device.type == "cuda" else 2**16) // ranks // 256 * 256
    whole = torch.empty(ranks * part, dtype=torch.uint8, device=clock.device).random_()
    own = whole[rank * part : (rank + 1) * part]
    gather = clock.milliseconds(lambda: start_gather_rows(own, group, whole).wait(), agree)
    rates = {"all_gather": (ranks - 1) * part / gather}
    if clock.device.type == "cuda":
        with contextlib.suppress(UserError):  # all ranks raise it: the GPUs cannot share memory
            memory = SymmetricMemory(group, part, 0, clock.device)
            next_one = memory.view((rank + 1) % ranks, 0, (part,), torch.uint8)
            rates["copy engines"] = part / clock.milliseconds(lambda: next_one.copy_(own, non_blocking=True), agree)
            agree(0)  # the memory is freed only after the copies of all ranks
    return rates


def summary(found: list[Timed]) -> dict[str, float]:
    """Returns the milliseconds of each part in a step."""
    parts = {part: sum(each.count * each.milliseconds for each in found if each.part == part) for part in PARTS}
    return {part: round(ms, 2) for part, ms in parts.items() if ms}
