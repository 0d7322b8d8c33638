"""Where backward puts the gradient of a parameter: into its slice of the unit's gradient buffer, at once or later.

The contract: a layer's backward hands its contribution to the parameter's main gradient and adds nothing to `.grad`.
The main gradient accumulates it in the buffer's type (float32 at least), then calls `on_accumulated`. The call comes
when the numbers are in the buffer, not when the layer is done: a deferred product counts when it is computed. A layer
that replays as a CUDA graph captures the accumulation; the code that replays the graph calls `on_accumulated`.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core.collectives import Pending
from megatron.core.distributed.autograd_callbacks import BackwardEndCallback
from megatron.core.parameters import InputsToGather, main_grad_accumulator

_DIRECT_PRODUCTS = (torch.bfloat16, torch.float16)
"""Types whose products a GPU accumulates straight into a float32 buffer."""

Accumulate = Callable[[Tensor, Tensor, Tensor], None]
"""Adds a product of output gradients and inputs to a gradient: (gradient, output gradients, inputs)."""


class BufferMainGrad:
    """Accumulates one parameter's gradient into `gradient`, a view of a unit's buffer shaped as the parameter."""

    def __init__(
        self,
        parameter: nn.Parameter,
        gradient: Tensor,
        on_accumulated: Callable[[nn.Parameter], None],
        opened: Callable[[], None] | None = None,
    ) -> None:
        self.parameter = parameter
        self.gradient = gradient
        self.on_accumulated = on_accumulated
        self.opened = opened or _nothing
        """Called before `gradient` is written, whose memory may come and go."""
        self.queue: WeightGradientQueue | None = None
        """Keeps products that are put off."""
        # Parameters that no main_grad-aware operation uses (norms, biases) get an ordinary gradient, which is moved.
        self._hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(_move_gradient)

    @property
    def defers_weight_grad(self) -> bool:
        """Products that come now are kept for later."""
        return self.queue is not None and self.queue.takes_products

    def add_product(self, output_gradient: Tensor, inputs: Tensor | InputsToGather) -> None:
        """gradient += output_gradient^T @ inputs ([t, out], [t, in]), now, or when the queue computes it."""
        self._add(output_gradient, inputs, accumulate_product)

    def add_grouped_product(self, output_gradient: Tensor, inputs: Tensor, accumulate: Accumulate) -> None:
        """accumulate(gradient, output_gradient, inputs), now, or when the queue computes it."""
        self._add(output_gradient, inputs, accumulate)

    def _add(self, output_gradient: Tensor, inputs: Tensor | InputsToGather, accumulate: Accumulate) -> None:
        if self.queue is not None and self.queue.takes_products:
            self.queue.add(self, output_gradient, inputs, accumulate)
        else:
            assert isinstance(inputs, Tensor)
            self.compute_product(output_gradient, inputs, accumulate)

    def compute_product(self, output_gradient: Tensor, inputs: Tensor, accumulate: Accumulate) -> None:
        """A product that was added, now."""
        self.opened()
        accumulate(self.gradient, output_gradient.detach(), inputs.detach())
        self.on_accumulated(self.parameter)

    def add_rows(self, index: Tensor, gradient: Tensor) -> None:
        """Row index[i] += gradient[i], repeated indices summed (int64 [t], [t, h])."""
        self.opened()
        rows = gradient.detach().to(self.gradient.dtype)
        if self.gradient.is_cuda:
            # Sorts first, so that the order of the sum, and its last bit, is the same at every run.
            self.gradient.index_put_((index,), rows, accumulate=True)
        else:
            self.gradient.index_add_(0, index, rows)
        self.on_accumulated(self.parameter)

    def add(self, gradient: Tensor) -> None:
        """gradient += a gradient shaped as the parameter."""
        self.opened()
        self.gradient.add_(gradient.detach())
        self.on_accumulated(self.parameter)

    def detach(self) -> None:
        """Stop taking the parameter's gradients."""
        self._hook.remove()


class WeightGradientQueue:
    """Keeps the products of a model chunk's weight gradients, by micro-batch, until they are asked for.

    Zero-bubble pipelines compute input gradients first, which other stages wait for, and these products in time that
    would pass idly (Qi et al. 2023, arXiv:2401.10241). What is kept are the two factors, detached: no graph, no other
    activation. How many micro-batches may wait is the schedule's affair.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._waiting: dict[Hashable, list[_Product]] = {}
        self._open: Hashable | None = None
        self._backward_end = BackwardEndCallback(self.catch_up)
        for parameter in parameters:
            main_grad = main_grad_accumulator(parameter)
            if isinstance(main_grad, BufferMainGrad):
                main_grad.queue = self

    @property
    def takes_products(self) -> bool:
        """Within `defer`."""
        return self._open is not None

    @contextlib.contextmanager
    def defer(self, key: Hashable) -> Iterator[None]:
        """Products of a backward that runs in here wait until `compute(key)`."""
        assert key is not None and self._open is None and key not in self._waiting, (key, self._open)
        self._open, self._waiting[key] = key, []
        try:
            yield
        finally:
            self._open = None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[Callable[[], None]]:
        """Products of a backward that runs in here wait until the function that is given is called, or for the end of
        the backward: whoever waits for something else there has them to compute."""
        with self.defer(_DEFERRED):
            try:
                yield self.catch_up
            finally:
                del self._waiting[_DEFERRED]

    def catch_up(self) -> None:
        """Compute the products that lag."""
        if _DEFERRED in self._waiting:
            products, self._waiting[_DEFERRED] = self._waiting[_DEFERRED], []
            _compute(products)

    def add(
        self,
        main_grad: BufferMainGrad,
        output_gradient: Tensor,
        inputs: Tensor | InputsToGather,
        accumulate: Accumulate,
    ) -> None:
        """Keep a product for later."""
        if self._open is _DEFERRED:
            self._backward_end.expect()
        kept = inputs.detach() if isinstance(inputs, Tensor) else inputs
        self._waiting[self._open].append((main_grad, output_gradient.detach(), kept, accumulate))

    def compute(self, key: Hashable) -> None:
        """Compute the products that were put off under a key. Inputs that lie on several ranks are gathered while the
        product before is computed."""
        _compute(self._waiting.pop(key))


_DEFERRED = object()
"""The key of products that wait no longer than a backward."""

_Product = tuple[BufferMainGrad, Tensor, Tensor | InputsToGather, Accumulate]


def _compute(products: Sequence[_Product]) -> None:
    gathering = _begin(products[0][2]) if products else None
    for place, (main_grad, output_gradient, _, accumulate) in enumerate(products):
        assert gathering is not None
        inputs = gathering.wait()
        if place + 1 < len(products):
            gathering = _begin(products[place + 1][2])
        main_grad.compute_product(output_gradient, inputs, accumulate)


def _begin(inputs: Tensor | InputsToGather) -> Pending:
    return Pending(inputs, None) if isinstance(inputs, Tensor) else inputs.start_gather()


def accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T @ right, accumulated in the type of `total` ([t, out], [t, in] into [out, in])."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif left.is_cuda and left.dtype in _DIRECT_PRODUCTS and total.dtype is torch.float32:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.t().to(total.dtype), right.to(total.dtype))


def attach_main_grad(
    parameter: nn.Parameter,
    gradient: Tensor,
    on_accumulated: Callable[[nn.Parameter], None],
    opened: Callable[[], None] | None = None,
) -> None:
    """Give a parameter a main_grad, in place of one from an earlier wrapping, and the published view `main_grad`."""
    earlier = main_grad_accumulator(parameter)
    if isinstance(earlier, BufferMainGrad):
        earlier.detach()
    parameter.main_grad_accumulator = BufferMainGrad(parameter, gradient, on_accumulated, opened)  # type: ignore[attr-defined]
    parameter.main_grad = gradient  # type: ignore[attr-defined]


def _nothing() -> None:
    """The gradient's memory is always there."""


def _move_gradient(parameter: Tensor) -> None:
    # Also called, without a gradient, for a parameter whose operation fed the main_grad itself.
    main_grad = main_grad_accumulator(parameter)
    if parameter.grad is not None and main_grad is not None:
        main_grad.add(parameter.grad)
        parameter.grad = None
