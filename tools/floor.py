"""The floor of a training step: the least time of its products, its attention and the bytes that it must move.

`Recorder` notes what one micro-batch asks of the backend's operations. `measure_floor` times each distinct product and
attention alone, on random data and for long enough that the GPU reaches its power limit as in training, and a device
copy. Memory-bound operations count as if they read their inputs and wrote their outputs once, at the copy's rate; sums
at the forks of residuals are part of the norm before them. `tools/bench.py CELL --floor` prints the result.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megatron.core import backends
from megatron.core.backends import Backend, fp8_settings
from megatron.core.distributed.main_grad import accumulate_product
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.ops.fp8.quantize import Quantized
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit, Role, Scaling, build_scaling
from megatron.core.ops.linear import product

PARTS = ("products", "casts to fp8", "attention", "memory-bound operations", "update of the weights")
"""What a floor adds up."""


@dataclass(frozen=True)
class Product:
    """A linear layer of a micro-batch: [rows, inputs] x [outputs, inputs]."""

    rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    fp8: bool = False
    experts: bool = False
    """Whether the rows are divided among experts; timed as one product of the same FLOPs."""
    backward: tuple[bool, bool] = (True, True)
    """Whether the gradients of the inputs and of the weight are computed."""

    @property
    def flops(self) -> float:
        """Floating point operations of one product."""
        return 2.0 * self.rows * self.inputs * self.outputs

    def describe(self) -> str:
        """Returns the sizes, and how they are multiplied."""
        kind = "fp8" if self.fp8 else str(self.dtype).removeprefix("torch.")
        return f"{self.rows} x {self.inputs} x {self.outputs} {kind}" + (" (experts, as one)" if self.experts else "")


@dataclass(frozen=True, eq=False)
class Attention:
    """A call of an attention kernel, without its data."""

    compute: Callable[..., Tensor]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    variant: AttentionVariant
    call: AttentionCall

    @property
    def key(self) -> Any:
        """Equal for calls that take equally long."""
        return self.shapes, self.strides, self.variant

    @property
    def flops(self) -> float:
        """Floating point operations of forward as Megatron-LM counts them: half of all pairs."""
        (queries, batch, heads, width), (keys, *_), (*_, value_width) = self.shapes
        return float(queries * keys * batch * heads * (width + value_width))


class Recorder:
    """What one micro-batch asks of the operations of its backend."""

    def __init__(self) -> None:
        self.products: Counter[Product] = Counter()
        self.attention: dict[Any, tuple[Attention, int]] = {}
        self.moved: Counter[str] = Counter()
        """Bytes that the forward and backward of each memory-bound operation must move."""
        self._open = self._done = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Models that are built inside have operations that this recorder sees."""
        kernels = backends.triton_backend()
        recorded = None if kernels is None else self.recording(kernels)
        with (
            mock.patch.object(backends, "LOCAL", self.recording(backends.LOCAL)),
            mock.patch.object(backends, "triton_backend", lambda: recorded),
        ):
            yield

    def recording(self, backend: Backend) -> Backend:
        """Returns the backend with operations that are recorded."""
        changed: dict[str, Any] = {name: self._noting(note, getattr(backend, name)) for name, note in _NOTES.items()}
        changed["attention"] = {
            asked: tuple(
                dataclasses.replace(
                    kernel, compute=self._noting(partial(_note_attention, kernel.compute), kernel.compute)
                )
                for kernel in kernels
            )
            for asked, kernels in backend.attention.items()
        }
        multiply = self._noting(_note_fp8_product, backend.fp8_kernels.product)
        noting = {name: self._noting(_NOTES[name], kernel) for name, kernel in backend.fp8_kernels.noting.items()}
        changed["fp8_kernels"] = dataclasses.replace(backend.fp8_kernels, product=multiply, noting=noting)
        return dataclasses.replace(backend, **changed)

    def _noting(self, note: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            result = function(*args, **keywords)
            if self._open:
                note(self, result, *args, **keywords)
            return result

        return call

    def around(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward step; its first call is recorded."""

        def recorded(data: Any, model: nn.Module) -> Any:
            self._open = not self._done
            try:
                return forward_step(data, model)
            finally:
                self._open, self._done = False, True

        return recorded

    def flops(self) -> float:
        """Returns the floating point operations of forward and backward of the micro-batch."""
        found = sum(count * product.flops for product, count in self.products.items())
        return 3.0 * (found + sum(count * call.flops for call, count in self.attention.values()))


# ---------------------------------------------------------------------------------------------------------------------
# What each operation needs


def _size(*tensors: Any) -> int:
    """Returns the bytes of tensors; None has none."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def _note_product(seen: Recorder, inputs: Tensor, weight: Tensor, *, rows: int | None = None, **more: Any) -> None:
    outputs, width = weight.shape[-2:]
    count = inputs.numel() // width if rows is None else rows
    asked = inputs.requires_grad, weight.requires_grad
    seen.products[Product(count, width, outputs, inputs.dtype, backward=asked, **more)] += 1


def _note_linear(seen: Recorder, output: Tensor, inputs: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    _note_product(seen, inputs, weight, rows=output.numel() // weight.shape[0])


def _note_grouped(seen: Recorder, output: Tensor, inputs: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    _note_product(seen, inputs, weight, experts=True)


def _note_head(
    seen: Recorder, losses: Tensor, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, *_: Any, **__: Any
) -> None:
    _note_product(seen, hidden, weight, rows=labels.numel())
    seen.moved["cross entropy"] += 2 * labels.numel() * weight.shape[0] * hidden.element_size()


def _note_fp8_product(
    seen: Recorder, output: Tensor, left: Quantized, right: Quantized, dtype: torch.dtype, *_: Any, **__: Any
) -> None:
    rows, width = left.values.shape
    seen.products[Product(rows, width, right.values.shape[0], dtype, fp8=True)] += 1


def _note_attention(
    compute: Callable[..., Tensor],
    seen: Recorder,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: AttentionVariant,
    call: AttentionCall,
) -> None:
    tensors = (query, key, value)
    found = Attention(
        compute,
        tuple(tensor.shape for tensor in tensors),
        tuple(tensor.stride() for tensor in tensors),
        query.dtype,
        variant,
        call,
    )
    first, count = seen.attention.get(found.key, (found, 0))
    seen.attention[found.key] = first, count + 1


def _note_norm(seen: Recorder, output: Any, inputs: Tensor, *_: Any, **__: Any) -> None:
    output = output[0] if isinstance(output, tuple) else output
    # Backward reads the input and the output's gradient.
    seen.moved["norms"] += 3 * _size(inputs) + 2 * _size(output)


def _note_residual(
    seen: Recorder, output: Tensor, inputs: Tensor, bias: Any, residual: Any, probability: float, *_: Any, **__: Any
) -> None:
    # Where the residual forks, backward reads its gradient once more; a bias's gradient is a sum over the rows.
    backward = _size(residual) + (_size(output) if bias is not None else 0) + (2 * _size(inputs) if probability else 0)
    if residual is not None or bias is not None or probability:
        seen.moved["residuals"] += _size(inputs, residual, output) + backward


def _note_activation(seen: Recorder, output: Tensor, inputs: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["activations"] += 3 * _size(inputs) + 2 * _size(output)


def _note_rope(seen: Recorder, output: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["rotary positions"] += 4 * _size(output)


def _note_embedding(seen: Recorder, output: Tensor, *_: Any, **__: Any) -> None:
    # Backward adds the rows to a float32 gradient.
    seen.moved["embedding"] += 3 * _size(output) + 2 * 4 * output.numel()


def _note_rows(seen: Recorder, output: Tensor, rows: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["permutation"] += 2 * _size(output, rows)


def _note_cross_entropy(seen: Recorder, losses: Tensor, logits: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["cross entropy"] += 2 * _size(logits)


def _note_convolution(seen: Recorder, output: Tensor, inputs: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["convolutions"] += 3 * _size(inputs) + 2 * _size(output)


_NOTES: dict[str, Callable[..., None]] = {
    "linear": _note_linear,
    "grouped_linear": _note_grouped,
    "head_loss": _note_head,
    "rms_norm": _note_norm,
    "layer_norm": _note_norm,
    "rms_norm_with_residual": _note_norm,
    "layer_norm_with_residual": _note_norm,
    "bias_dropout_add": _note_residual,
    "weighted_activation": _note_activation,
    "apply_rope": _note_rope,
    "embedding": _note_embedding,
    "permute": _note_rows,
    "unpermute": _note_rows,
    "cross_entropy": _note_cross_entropy,
    "causal_conv": _note_convolution,
}
"""For each operation of a backend that is recorded, a function of (recorder, result, arguments of the call)."""


# ---------------------------------------------------------------------------------------------------------------------
# Rates


@dataclass(frozen=True)
class Timed:
    """A part of the floor."""

    part: str
    name: str
    count: int
    """Times in a step."""
    milliseconds: float
    """Time of one."""
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

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Returns the mean time of a call, after calls that bring the GPU to the clock rate of this operation."""
        self._time(run, 2)
        count = max(3, min(5000, round(self.seconds * 1000 / max(self._time(run, 3), 1e-3))))
        self._time(run, count // 3)
        return self._time(run, count)

    def _time(self, run: Callable[[], object], count: int) -> float:
        count = max(1, count)
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(count):
                run()
            return (time.perf_counter() - begin) * 1000 / count
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    def copy_rate(self) -> float:
        """Returns the bytes that a copy reads and writes in a millisecond."""
        size = 2**28 if self.device.type == "cuda" else 2**16
        source = torch.randn(size, device=self.device)
        target = torch.empty_like(source)
        return 2.0 * _size(source) / self.milliseconds(lambda: target.copy_(source))


def measure_floor(seen: Recorder, config: Any, num_microbatches: int, update_bytes: int, clock: Clock) -> list[Timed]:
    """Returns the parts of the floor of a step of `num_microbatches`. `config` is the model's; the update of the
    weights moves `update_bytes`."""
    rate = clock.copy_rate()
    settings = fp8_settings(config, (config.num_layers + 1) // 2, backends.choose_backend(config).fp8_kernels)
    found = []
    for each, count in seen.products.items():
        timed = _fp8_products(each, settings, clock) if each.fp8 else _products(each, clock)
        found += [
            Timed("products", f"{each.describe()}, {name}", count * num_microbatches, ms, each.flops)
            for name, ms in timed.items()
        ]
        if each.fp8:
            # Each matrix is read once and written in both layouts; weights once a step.
            tokens, weight = 4 * each.rows * (each.inputs + each.outputs), 4 * each.inputs * each.outputs
            moved = tokens * num_microbatches + weight
            found.append(Timed("casts to fp8", each.describe(), count, moved / rate))
    for call, count in seen.attention.values():
        for name, ms, flops in _attention(call, clock):
            found.append(Timed("attention", name, count * num_microbatches, ms, flops))
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


def _attention(call: Attention, clock: Clock) -> list[tuple[str, float, float]]:
    """Returns name, milliseconds and floating point operations of forward and backward."""
    query, key, value = (
        torch.empty_strided(shape, stride, device=clock.device, dtype=call.dtype).normal_().requires_grad_()
        for shape, stride in zip(call.shapes, call.strides, strict=True)
    )
    compute = partial(call.compute, query, key, value, call.variant, call.call)
    output = compute()
    gradient = torch.randn_like(output)
    backward = partial(torch.autograd.grad, output, (query, key, value), gradient, retain_graph=True)
    (length, batch, heads, width), (*_, value_width) = call.shapes[0], call.shapes[2]
    name = f"batch {batch}, {length} queries, {heads} heads, {width} and {value_width} channels"
    return [
        (f"{name}, forward", clock.milliseconds(compute), call.flops),
        (f"{name}, backward", clock.milliseconds(backward), 2.5 * call.flops),  # it computes the scores again
    ]


def summary(found: list[Timed]) -> dict[str, float]:
    """Returns the milliseconds of each part in a step."""
    parts = {part: sum(each.count * each.milliseconds for each in found if each.part == part) for part in PARTS}
    return {part: round(ms, 2) for part, ms in parts.items() if ms}
