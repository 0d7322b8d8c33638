"""Transformer Engine computes the products of linear layers, of the model and of experts. Its module gets stand-ins for
our parameters. A stand-in shares the memory of our parameter and is registered nowhere. It adds a weight's gradient to
the stand-in's `main_grad`, which is our main gradient; without one, the stand-in's `.grad` is moved to our parameter.
Communication stays ours: the module sees one rank.
"""

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import Group, gather_rows, start_all_reduce, start_reduce_scatter_rows
from megatron.core.ops.fp8.linear import QuantizedWeights
from megatron.core.ops.fp8.recipes import Fp8Settings
from megatron.core.ops.linear import linear
from megatron.core.ops.moe.grouped_linear import RowGroups, grouped_linear
from megatron.core.ops.transformer_engine.engine import (
    Engine,
    fp8_rows,
    quantized_forward,
    recipe_of,
    updates_gradient_scales,
)
from megatron.core.parameters import info_of, main_grad_accumulator
from megatron.core.utils.autograd_context import AutogradContext


class EngineLinear:
    """The products of one linear layer. Called like `ops.linear.linear`, with the same weight each time."""

    def __init__(self, engine: Engine, recipe: Any = None) -> None:
        self.engine, self.recipe = engine, recipe
        self.multiple = fp8_rows(engine, recipe)
        """Numbers of rows are padded to multiples of this."""
        self.module: Any = None
        """Transformer Engine's module; None before the first call."""
        self._fused = False
        self._given: tuple[Any, ...] = ()
        """The parameters that the stand-ins were made from."""

    def __call__(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        group: Group = None,
        *,
        gathers: bool = False,
        weights_changed: bool | None = None,
    ) -> Tensor:
        """Returns inputs @ weight^T + bias: [..., in] x [out, in] (+ [out]) -> [..., out]; see `ops.linear.linear`.

        With fp8, `weights_changed` tells whether the kept quantised weight is out of date; None: no quantised weight is
        kept.
        """
        if inputs.numel() == 0 or not self.engine.takes(inputs, weight):
            return linear(inputs, weight, bias, group, gathers=gathers)
        self._prepare(weight, bias)
        rows = _Enter.apply(inputs.flatten(0, -2), weight, bias, self, group, gathers)  # [t, in]
        padding = -rows.shape[0] % self.multiple
        padded = F.pad(rows, (0, 0, 0, padding)) if padding else rows
        output = self._compute(padded, (), weights_changed, weight)
        output = output[: rows.shape[0]] if padding else output
        return output if inputs.dim() == 2 else output.unflatten(0, (-1, *inputs.shape[1:-1]))

    def _prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        """Makes the module at the first call, and gives it stand-ins for the parameters as they are now."""
        accumulator = main_grad_accumulator(weight)
        if self.module is None or self._fused != (accumulator is not None):
            self._fused, self._given = accumulator is not None, ()
            self.module = self._build(weight, bias)
            for name in (*self._names(weight), *(() if bias is None else ("bias",))):
                setattr(self.module, name, nn.Parameter(weight.new_empty(0)))
        standing = [getattr(self.module, name) for name in self._names(weight)]
        given = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in (weight, bias) if tensor is not None)
        if given != self._given:
            # The objects stay: a backward that is still to come looks for its main gradient on them.
            for parameter, matrix in zip(standing, self._matrices(weight), strict=True):
                parameter.data = matrix
                parameter.requires_grad_(weight.requires_grad)
            if bias is not None:
                self.module.bias.data = bias.data
                self.module.bias.requires_grad_(bias.requires_grad)
            self._given = given
        if accumulator is not None:
            for parameter, gradient in zip(standing, self._matrices(accumulator.gradient), strict=True):
                parameter.main_grad = gradient

    def _build(self, weight: Tensor, bias: Tensor | None) -> object:
        out, width = weight.shape[-2:]
        return self.engine.pytorch.Linear(
            width,
            out,
            bias=bias is not None,
            params_dtype=weight.dtype,
            device="meta",
            fuse_wgrad_accumulation=self._fused,
        )

    def _matrices(self, stacked: Tensor) -> Sequence[Tensor]:
        return (stacked.data,)

    def _names(self, weight: Tensor) -> Sequence[str]:
        return ("weight",)

    def _compute(self, rows: Tensor, more: tuple[Any, ...], weights_changed: bool | None, weight: Tensor) -> Tensor:
        with quantized_forward(self.engine, self.recipe):
            first = None if weights_changed is None or not torch.is_grad_enabled() else False
            if first is False and weights_changed:
                # Quantises the weight. The real call is never the first one, because Transformer Engine overwrites
                # main gradients in backward of a first micro-batch.
                nothing = rows.new_zeros(self._fewest_rows(), rows.shape[1]).requires_grad_()
                self.module(nothing, *self._fewest(more), is_first_microbatch=True)
            output: Tensor = self.module(rows, *more, is_first_microbatch=first)
        accumulator = main_grad_accumulator(weight)
        if accumulator is not None and output.requires_grad and weight.requires_grad:
            output.register_hook(functools.partial(_before_write, accumulator))
        return output

    def _fewest_rows(self) -> int:
        return self.multiple

    def _fewest(self, more: tuple[object, ...]) -> tuple[Any, ...]:
        return more

    def take_gradients(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of weight and bias that backward left in the stand-ins, and removes them. A gradient
        that went to the main gradient is reported there instead."""
        standing = [getattr(self.module, name) for name in self._names(weight)]
        gradients = [parameter.grad for parameter in standing]
        for parameter in standing:
            parameter.grad = None
        bias_gradient = None
        if bias is not None:
            bias_gradient, self.module.bias.grad = self.module.bias.grad, None
        accumulator = main_grad_accumulator(weight)
        if accumulator is not None and weight.requires_grad:
            accumulator.end_write()
            return None, bias_gradient
        found = [gradient for gradient in gradients if gradient is not None]
        return (self._join(found) if len(found) == len(gradients) else None), bias_gradient

    def _join(self, gradients: Sequence[Tensor]) -> Tensor:
        return gradients[0]


class EngineGroupedLinear(EngineLinear):
    """The products of one linear layer of all experts of a rank, called like `ops.moe.grouped_linear.grouped_linear`.
    Reads the numbers of rows on the host."""

    def __call__(  # type: ignore[override]
        self, inputs: Tensor, weight: Tensor, groups: RowGroups, weights_changed: bool | None = None
    ) -> Tensor:
        """Returns inputs [n, in] times the transposed weight of each row's group [groups, out, in]: [n, out]."""
        if inputs.shape[0] == 0 or not self.engine.takes(inputs, weight):
            return grouped_linear(inputs, weight, groups)
        self._prepare(weight, None)
        self._groups = weight.shape[0]
        sizes = list(groups.host_sizes)
        rows: Tensor = _Enter.apply(inputs, weight, None, self, None, False)
        if self.recipe is None:
            return self._compute(rows, (sizes,), weights_changed, weight)
        padded_sizes = [size + -size % self.multiple for size in sizes]
        if padded_sizes == sizes:
            return self._compute(rows, (sizes,), weights_changed, weight)
        number = len(sizes)
        rows, padded_sizes = self.engine.pytorch.Fp8Padding(number, align_size=self.multiple)(rows, sizes)
        output = self._compute(rows, (list(padded_sizes),), weights_changed, weight)
        whole: Tensor = self.engine.pytorch.Fp8Unpadding(number, align_size=self.multiple)(output, sizes)
        return whole

    def _build(self, weight: Tensor, bias: Tensor | None) -> object:
        number, out, width = weight.shape
        return self.engine.pytorch.GroupedLinear(
            number,
            width,
            out,
            bias=False,
            params_dtype=weight.dtype,
            device="meta",
            fuse_wgrad_accumulation=self._fused,
        )

    def _matrices(self, stacked: Tensor) -> Sequence[Tensor]:
        return stacked.data.unbind(0)

    def _names(self, weight: Tensor) -> Sequence[str]:
        return [f"weight{number}" for number in range(weight.shape[0])]

    def _fewest_rows(self) -> int:
        return self.multiple * self._groups

    def _fewest(self, more: tuple[object, ...]) -> tuple[Any, ...]:
        return ([self.multiple] * self._groups,)

    def _join(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(gradients))


class _Enter(torch.autograd.Function):
    """The rows that the products read. The backward of this function runs after the backward of the products. It passes
    on the parameters' gradients and sums the inputs' gradient over ranks."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: EngineLinear,
        group: Group,
        gathers: bool,
    ) -> Tensor:
        ctx.layer, ctx.weight, ctx.bias, ctx.group, ctx.gathers = layer, weight, bias, group, gathers
        return gather_rows(inputs, group) if gathers else inputs.view_as(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight_gradient, bias_gradient = ctx.layer.take_gradients(ctx.weight, ctx.bias)
        summed = None
        if ctx.needs_input_grad[0]:
            start = start_reduce_scatter_rows if ctx.gathers else start_all_reduce
            summed = start(gradient, ctx.group).wait()
        return summed, weight_gradient, bias_gradient, None, None, None


def _before_write(accumulator: Any, gradient: Tensor) -> None:
    accumulator.begin_write()


class _NoScaling:
    """Replaces `Scaling` in a layer whose scales Transformer Engine keeps."""

    gradient_share = 1.0

    weight_block = None
    """Its layers quantise weights themselves, and keep them."""

    def forget(self) -> None:
        """Does nothing: there is no state to drop."""


class EngineFp8Linear(QuantizedWeights[Any]):
    """Products in fp8 by Transformer Engine, which keeps the quantised weight until `forget_weights`. Called like the
    products that it wraps. Has no state in checkpoints."""

    surrounds_forward = True

    def __init__(self, settings: Fp8Settings, weight: Tensor, products: EngineLinear) -> None:
        super().__init__(settings, weight)
        self.products = products
        self.scaling = _NoScaling()
        self._key: tuple[int, int] | None = None

    def forward(self, inputs: Tensor, weight: Tensor, *more: Any, **keywords: Any) -> Tensor:
        """Returns the result of the products."""
        changed = None
        if self._keeps_weights and torch.is_grad_enabled():
            has_backward = inputs.numel() > 0 and (inputs.requires_grad or weight.requires_grad)
            if has_backward and updates_gradient_scales(self.products.engine, self.products.recipe):
                self._key = None  # quantised in the product itself: `_compute` would put one without a backward first
            else:
                key = weight.data_ptr(), weight._version
                changed, self._key = key != self._key, key
        return self.products(inputs, weight, *more, weights_changed=changed, **keywords)

    def forget_weights(self) -> None:
        """Makes the next call quantise the weight again."""
        self._key = None

    def around_forward(self) -> AbstractContextManager[None]:
        """Returns the context in which the forward of a whole model runs."""
        return quantized_forward(self.products.engine, self.products.recipe)


def make_linear(engine: Engine, settings: Fp8Settings | None, weight: Tensor) -> Any:
    """Returns the function that computes one linear layer."""
    products = EngineLinear(engine, recipe_of(engine, settings))
    return products if settings is None else EngineFp8Linear(settings, weight, products)


def make_grouped_linear(engine: Engine, settings: Fp8Settings | None, weight: Tensor) -> Any:
    """Returns the function that computes one linear layer of all experts of a rank."""
    weight.info = dataclasses.replace(info_of(weight), is_added_to_directly=True)  # type: ignore[attr-defined]
    products = EngineGroupedLinear(engine, recipe_of(engine, settings))
    return products if settings is None else EngineFp8Linear(settings, weight, products)
