"""While a step is computed again, finds the first module whose output or gradient is not finite."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

WEIGHT, FORWARD, BACKWARD, WEIGHT_GRADIENT = "weight", "output of", "gradient at the output of", "gradient of weight"
PHASES = (WEIGHT, FORWARD, BACKWARD, WEIGHT_GRADIENT)
"""Kinds of findings, in the order in which a step meets them."""

LOSS = "the loss function"


@dataclass(frozen=True)
class Finding:
    """A tensor with non-finite elements."""

    rank: int
    phase: str
    """One of `PHASES`."""
    name: str
    """Canonical name of the module or weight: layers are counted over the whole model."""
    bad: int
    """Number of elements that are NaN or infinite."""
    elements: int
    microbatch: int | None = None
    """Number of the micro-batch on its rank, from 0; None for weights and their gradients."""
    sample_ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = "" if self.microbatch is None else f" in micro-batch {self.microbatch}"
        ids = ", ".join(map(str, self.sample_ids[:64])) + (", ..." if len(self.sample_ids) > 64 else "")
        samples = f", samples [{ids}]" if self.sample_ids else ""
        return f"rank {self.rank}: {self.phase} {self.name}{where}{samples}: {self.bad} of {self.elements} not finite"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Finding":
        """Builds a finding from the dictionary of its fields. Others are left out."""
        known = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields}
        return cls(**{**known, "sample_ids": tuple(known.get("sample_ids", ()))})


class NonFiniteSearch:
    """Watches all modules of a rank's model chunks. Waits for the device at every output and gradient.

    Use it as a context around forward and backward of a step. It keeps the first finding of each micro-batch: that of
    the forward pass if there is one, else that of the backward pass. Micro-batches are numbered by the forward passes
    of their chunk.
    """

    def __init__(self, model: Sequence[Any], rank: int) -> None:
        self.model, self.rank = model, rank
        self._found: dict[int, Finding] = {}
        self._others: list[Finding] = []
        self._current = threading.local()  # forward and backward of overlapped schedules have a thread each
        self._lock = threading.Lock()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "NonFiniteSearch":
        for chunk in self.model:
            for chunk_of in chunk.weight_chunks():
                self._see_weight(WEIGHT, chunk_of.name, chunk_of.flat)
            counter = iter(range(1 << 62))
            self._handles.append(chunk.register_forward_pre_hook(functools.partial(self._begin, counter)))
            self._handles.append(chunk.register_forward_hook(self._end))
            for name, module in canonical_modules(chunk):
                self._handles.append(module.register_forward_hook(functools.partial(self._see_output, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def watch(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward step, wrapped with checks of its results and those of its loss function."""

        @functools.wraps(forward_step)
        def step(*arguments: Any, **keywords: Any) -> Any:
            output, loss_function = forward_step(*arguments, **keywords)
            number = getattr(self._current, "number", None)
            self._see(FORWARD, "the forward step", output, number)

            @functools.wraps(loss_function)
            def loss(*inputs: Any, **options: Any) -> Any:
                result = loss_function(*inputs, **options)
                self._see(FORWARD, LOSS, result, number)
                return result

            return output, loss

        return step

    def see_gradients(self) -> None:
        """Checks the gradients of weights after they have been finalised."""
        for chunk in self.model:
            for chunk_of in chunk.gradient_chunks():
                self._see_weight(WEIGHT_GRADIENT, chunk_of.name, chunk_of.flat)

    def findings(self, sample_ids: Sequence[Sequence[int]]) -> list[Finding]:
        """Returns the weights that are not finite, the first finding of each micro-batch, and gradients of weights, in
        this order. `sample_ids` has the ids of each micro-batch."""
        named = []
        for number, finding in sorted(self._found.items()):
            ids = tuple(sample_ids[number]) if 0 <= number < len(sample_ids) else ()
            named.append(dataclasses.replace(finding, sample_ids=ids))
        found = [*self._others, *named]
        return sorted(found, key=lambda finding: PHASES.index(finding.phase))

    def _begin(self, counter: Iterator[int], chunk: nn.Module, inputs: Any) -> None:
        self._current.number = next(counter)

    def _end(self, chunk: nn.Module, inputs: Any, output: Any) -> None:
        """Makes the backward pass note its micro-batch, for layers that are recomputed in it."""
        number = self._current.number

        def begin_backward(gradient: Tensor) -> None:
            self._current.number = number

        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begin_backward)

    def _see_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        number = getattr(self._current, "number", None)
        self._see(FORWARD, name, output, number)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:  # a bias that a layer returns is a parameter, which all micro-batches share
                tensor.register_hook(lambda gradient: self._see(BACKWARD, name, gradient, number))

    def _see(self, phase: str, name: str, value: Any, number: int | None) -> None:
        if number is None or number in self._found:
            return
        for tensor in _tensors(value):
            bad = _count_bad(tensor)
            if bad:
                with self._lock:
                    finding = Finding(self.rank, phase, name, bad, tensor.numel(), number)
                    self._found.setdefault(number, finding)
                return

    def _see_weight(self, phase: str, name: str, values: Tensor) -> None:
        bad = _count_bad(values)
        if bad:
            self._others.append(Finding(self.rank, phase, name, bad, values.numel()))


def canonical_modules(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules inside a model chunk, without its wrappers, by name. Layers are numbered over the whole
    model."""
    root: Any = chunk
    while isinstance(getattr(root, "module", None), nn.Module):
        root = root.module
    numbers: dict[str, str] = {}
    for name, module in root.named_modules():
        if not name:
            continue
        parent, _, own = name.rpartition(".")
        canonical = getattr(module, "canonical_index", None)
        own = str(canonical) if isinstance(canonical, int) and own.isdigit() else own
        numbers[name] = f"{numbers[parent]}.{own}" if parent else own
        yield numbers[name], module


def depth_in_model(name: str) -> float:
    """Returns the number of the layer to which a module or weight with this canonical name belongs: -1 for modules
    before the layers, such as the embedding, and infinity for modules after them."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    if numbers and "layers" in name:
        return int(numbers[0])
    return -1.0 if "embedding" in name else float("inf")


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings of all ranks in the order in which a step computes the tensors."""

    def key(finding: Finding) -> tuple[float, ...]:
        depth = depth_in_model(finding.name)
        backward = finding.phase in (BACKWARD, WEIGHT_GRADIENT)
        number = -1 if finding.microbatch is None else finding.microbatch
        return PHASES.index(finding.phase), -depth if backward else depth, number, finding.rank

    return sorted(findings, key=key)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@torch.no_grad()
def _count_bad(tensor: Tensor) -> int:
    values = tensor.detach()
    if not values.numel():
        return 0
    values = values.float() if values.element_size() == 1 else values  # fp8 types have no isfinite
    return int((~torch.isfinite(values)).sum())
