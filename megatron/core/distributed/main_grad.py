"""Main gradients: backward writes each parameter's gradient into its slice of the unit's buffer, at once or deferred.

The contract: a layer's backward passes its contribution to the parameter's main gradient and adds nothing to `.grad`.
The main gradient accumulates it in the buffer's type (float32 at least, unless --main-grads-dtype is bf16) and then
calls `on_accumulated`. The call comes when the values are in the buffer, which for a deferred product is later than the
end of the layer's backward. A CUDA graph of a whole micro-batch replays the accumulation but not the call, so
reductions then start after the last micro-batch.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core.communication.collectives import Pending
from megatron.core.parameters import AccumulateProduct, InputsToGather, info_of, main_grad_accumulator
from megatron.core.utils.torch_private import BackwardEndCallback, index_put_unchecked_

_DIRECT_PRODUCTS = (torch.bfloat16, torch.float16)
"""Types whose matrix products a GPU accumulates directly into a float32 buffer."""


class BufferMainGrad:
    """Accumulates one parameter's gradient into `gradient`, a view of a unit's buffer shaped as the parameter."""

    def __init__(
        self,
        parameter: nn.Parameter,
        gradient: Tensor,
        on_accumulated: Callable[[nn.Parameter], None],
        before_write: Callable[[], None] | None = None,
        factor: float = 1.0,
    ) -> None:
        self.parameter = parameter
        self.gradient = gradient
        self.on_accumulated = on_accumulated
        self.before_write = before_write or _do_nothing
        """Called before each write to `gradient`, which may have no memory between uses."""
        self.factor = factor
        """Multiplies each contribution as it is added, which costs no pass over the gradient."""
        self.can_replace = False
        """Whether the last product could be written over the gradient instead of added to it."""
        self.is_outdated = False
        """Whether `gradient` counts as zero, with any numbers in its memory."""
        self._queue: WeightGradientQueue | None = None
        """Keeps deferred products; None: no product is deferred."""
        # Parameters of operations that do not know main gradients get an ordinary `.grad`, which this hook moves.
        self._hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(_move_gradient)

    @property
    def defers_weight_grad(self) -> bool:
        """Whether products that are added now are deferred."""
        return self._queue is not None and self._queue.takes_products

    def defer_products_to(self, queue: "WeightGradientQueue") -> None:
        """Lets `queue` take the products that are added while it defers."""
        self._queue = queue

    @contextlib.contextmanager
    def reporting_to(self, on_accumulated: Callable[[nn.Parameter], None]) -> Iterator[None]:
        """Inside the context, `on_accumulated` is called instead of the constructor's function."""
        before, self.on_accumulated = self.on_accumulated, on_accumulated
        try:
            yield
        finally:
            self.on_accumulated = before

    @contextlib.contextmanager
    def counted_once(self) -> Iterator[None]:
        """Contributions inside the context are reported as one, at its end. No product inside it is deferred: the
        queue would keep the factors of all of them."""
        queue, self._queue = self._queue, None
        try:
            with self.reporting_to(lambda parameter: None):
                yield
        finally:
            self._queue = queue
        self.on_accumulated(self.parameter)

    def add_product(self, output_gradient: Tensor, inputs: Tensor | InputsToGather) -> None:
        """Adds output_gradient^T @ inputs ([t, out], [t, in]) to the gradient, now or when the queue computes it."""
        self._add(output_gradient, inputs, accumulate_product)

    def add_grouped_product(
        self, output_gradient: Tensor, inputs: Tensor | InputsToGather, accumulate: AccumulateProduct
    ) -> None:
        """Lets `accumulate` add a product to the gradient, now or when the queue computes it."""
        self._add(output_gradient, inputs, accumulate)

    def _add(self, output_gradient: Tensor, inputs: Tensor | InputsToGather, accumulate: AccumulateProduct) -> None:
        if self._queue is not None and self._queue.takes_products:
            self._queue.add(self, output_gradient, inputs, accumulate)
        else:
            assert isinstance(inputs, Tensor)
            self.compute_product(output_gradient, inputs, accumulate)

    def compute_product(self, output_gradient: Tensor, inputs: Tensor, accumulate: AccumulateProduct) -> None:
        """Computes a product that was added."""
        self.before_write()
        left, right = output_gradient.detach(), inputs.detach()
        self.can_replace = getattr(accumulate, "can_replace", False)
        if self.can_replace and self.is_outdated:
            self.is_outdated = False
            accumulate(self.gradient, left, right, factor=self.factor, replaces=True)  # type: ignore[call-arg]
        else:
            self.zero_outdated()
            accumulate(self.gradient, left, right, factor=self.factor)
        self.on_accumulated(self.parameter)

    def zero_outdated(self) -> None:
        """Zeroes a gradient that only counts as zero."""
        if self.is_outdated:
            self.gradient.zero_()
            self.is_outdated = False

    def _begin_sum(self) -> None:
        self.before_write()
        self.zero_outdated()

    def add_rows(self, index: Tensor, gradient: Tensor) -> None:
        """Adds gradient[i] to row index[i]; repeated indices are summed (int64 [t], [t, h])."""
        self._begin_sum()
        rows = gradient.detach().to(self.gradient.dtype)
        if self.factor != 1.0:
            rows = rows * self.factor
        if self.gradient.is_cuda:
            # Sorts first, so that the order of the sum, and thus its last bit, is the same in every run. Forward has
            # checked the index; to check it here would wait for the device.
            index_put_unchecked_(self.gradient, [index], rows, accumulate=True, unsafe=True)
        else:
            self.gradient.index_add_(0, index, rows)
        self.on_accumulated(self.parameter)

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient shaped as the parameter."""
        self._begin_sum()
        self.gradient.add_(gradient.detach(), alpha=self.factor)
        self.on_accumulated(self.parameter)

    def begin_write(self) -> None:
        """Makes sure that `gradient` has memory. Call it before adding to it."""
        assert self.factor == 1.0, f"{info_of(self.parameter).name} is not declared as `is_added_to_directly`"
        self._begin_sum()

    def end_write(self) -> None:
        """Call it after adding a micro-batch's gradient to `gradient`."""
        self.on_accumulated(self.parameter)

    def detach(self) -> None:
        """Removes the hook: the parameter's gradients go to `.grad` again."""
        self._hook.remove()


class WeightGradientQueue:
    """Defers the matrix products of a model chunk's weight gradients.

    Zero-bubble pipelines compute input gradients first, because other stages wait for them, and the deferred products
    in time that would otherwise be idle (Qi et al. 2023, arXiv:2401.10241). The queue keeps only the two factors of
    each product, detached from the graph. The schedule decides how many micro-batches may be deferred.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._waiting: dict[Hashable, list[_Product]] = {}
        self._open: Hashable | None = None
        self._backward_end = BackwardEndCallback(self.compute_deferred)
        for parameter in parameters:
            main_grad = main_grad_accumulator(parameter)
            if isinstance(main_grad, BufferMainGrad):
                main_grad.defer_products_to(self)

    @property
    def takes_products(self) -> bool:
        """Whether a backward that runs now defers its products."""
        return self._open is not None

    @contextlib.contextmanager
    def defer(self, key: Hashable) -> Iterator[None]:
        """Defers the products of a backward inside the context until `compute(key)`."""
        assert key is not None and self._open is None and key not in self._waiting, (key, self._open)
        self._open, self._waiting[key] = key, []
        try:
            yield
        finally:
            self._open = None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[Callable[[], None]]:
        """Defers the products of a backward inside the context until the yielded function is called, or until the end
        of the backward. A layer that waits for communication in backward calls the function, so that it computes in the
        meantime."""
        with self.defer(_DEFERRED):
            try:
                yield self.compute_deferred
            finally:
                del self._waiting[_DEFERRED]

    def compute_deferred(self) -> None:
        """Computes the products of `deferred`."""
        if _DEFERRED in self._waiting:
            products, self._waiting[_DEFERRED] = self._waiting[_DEFERRED], []
            _compute(products)

    def add(
        self,
        main_grad: BufferMainGrad,
        output_gradient: Tensor,
        inputs: Tensor | InputsToGather,
        accumulate: AccumulateProduct,
    ) -> None:
        """Keeps a product for later."""
        if self._open is _DEFERRED:
            self._backward_end.expect()
        kept = inputs.detach() if isinstance(inputs, Tensor) else inputs
        self._waiting[self._open].append((main_grad, output_gradient.detach(), kept, accumulate))

    def compute(self, key: Hashable) -> None:
        """Computes the products that were deferred under a key. Inputs that are split over ranks are gathered while the
        previous product is computed."""
        _compute(self._waiting.pop(key))


_DEFERRED = object()
"""The key of products that are deferred within one backward."""

_Product = tuple[BufferMainGrad, Tensor, Tensor | InputsToGather, AccumulateProduct]


def _compute(products: Sequence[_Product]) -> None:
    gathering = _start_gather(products[0][2]) if products else None
    for number, (main_grad, output_gradient, _, accumulate) in enumerate(products):
        assert gathering is not None
        inputs = gathering.wait()
        if number + 1 < len(products):
            gathering = _start_gather(products[number + 1][2])
        main_grad.compute_product(output_gradient, inputs, accumulate)


def _start_gather(inputs: Tensor | InputsToGather) -> Pending:
    return Pending(inputs, None) if isinstance(inputs, Tensor) else inputs.start_gather()


def accumulate_product(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0, replaces: bool = False) -> None:
    """Adds `factor` times left^T @ right to `total`, accumulated in the type of `total` ([t, out], [t, in] into [out,
    in]). With `replaces` the total before does not count, and it may be NaN."""
    beta = 0 if replaces else 1
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right, alpha=factor, beta=beta)
    elif left.is_cuda and left.dtype in _DIRECT_PRODUCTS and total.dtype is torch.float32:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, alpha=factor, beta=beta, out=total)
    else:
        total.addmm_(left.t().to(total.dtype), right.to(total.dtype), alpha=factor, beta=beta)


accumulate_product.can_replace = True  # type: ignore[attr-defined]


def zero_or_mark(buffer: Tensor, main_grads: Sequence[BufferMainGrad]) -> None:
    """Lets all gradients in a flat buffer count as zero, `main_grads` being its parts in their order. A gradient that a
    product can replace is only marked, which saves writing the zeros and reading them again."""
    start = 0
    for main_grad in main_grads:
        if main_grad.can_replace:
            main_grad.is_outdated = True
            stop = int(main_grad.gradient.storage_offset() - buffer.storage_offset())
            buffer[start:stop].zero_()
            start = stop + main_grad.gradient.numel()
    buffer[start:].zero_()


def attach_main_grad(
    parameter: nn.Parameter,
    gradient: Tensor,
    on_accumulated: Callable[[nn.Parameter], None],
    before_write: Callable[[], None] | None = None,
    factor: float = 1.0,
) -> BufferMainGrad:
    """Gives a parameter its accumulator and Megatron-LM's view `main_grad`. Replaces those of an earlier wrapper.
    Returns the accumulator."""
    earlier = main_grad_accumulator(parameter)
    if isinstance(earlier, BufferMainGrad):
        earlier.detach()
    main_grad = BufferMainGrad(parameter, gradient, on_accumulated, before_write, factor)
    parameter.main_grad_accumulator = main_grad  # type: ignore[attr-defined]
    parameter.main_grad = gradient  # type: ignore[attr-defined]
    return main_grad


def _do_nothing() -> None:
    """For gradients that always have memory."""


def _move_gradient(parameter: Tensor) -> None:
    # Also called without a gradient, for a parameter whose operation wrote the main gradient itself.
    main_grad = main_grad_accumulator(parameter)
    if parameter.grad is not None and main_grad is not None:
        main_grad.add(parameter.grad)
        parameter.grad = None
