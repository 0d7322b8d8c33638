"""Initial values of parameters: functions that fill a whole tensor. Those of large matrices can also compute any box of
it without the other elements."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.core.counter_rng import standard_normal, uniform


class Initializer(Protocol):
    """Fills a whole tensor in place. Classes with `values` can also compute any box of it without the rest."""

    def __call__(self, tensor: Tensor, /) -> object:
        """Fills the tensor."""


@dataclass(frozen=True)
class Normal:
    """Normal distribution with mean 0."""

    std: float

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fills a whole tensor with torch's generator; returns it."""
        return nn.init.normal_(tensor, mean=0.0, std=self.std)

    def values(self, index: Tensor, key: tuple[int, int], global_shape: tuple[int, ...]) -> Tensor:
        """Returns the values at canonical indices, in float64."""
        return standard_normal(index, key) * self.std


@dataclass(frozen=True)
class XavierUniform:
    """Uniform in (-a, a) with a = sqrt(6 / (fan in + fan out)) of the whole [out, in] tensor (Glorot and Bengio
    2010)."""

    stacked: int = 0
    """Number of leading dimensions that index separate tensors, such as experts, each with its own fans."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fills a whole tensor with torch's generator; returns it."""
        for part in tensor.flatten(0, self.stacked - 1) if self.stacked else (tensor,):
            if part.dim() > 1:
                nn.init.xavier_uniform_(part)
        return tensor

    def values(self, index: Tensor, key: tuple[int, int], global_shape: tuple[int, ...]) -> Tensor:
        """Returns the values at canonical indices, in float64."""
        fan_in = global_shape[-1]
        bound = math.sqrt(6.0 / (fan_in + math.prod(global_shape[self.stacked : -1])))
        return (uniform(index, key) * 2.0 - 1.0) * bound


@dataclass(frozen=True)
class Constant:
    """One value for all elements."""

    value: float

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fills a whole tensor with torch's generator; returns it."""
        return nn.init.constant_(tensor, self.value)

    def values(self, index: Tensor, key: tuple[int, int], global_shape: tuple[int, ...]) -> Tensor:
        """Returns the values at canonical indices, in float64."""
        return torch.full_like(index, self.value, dtype=torch.float64)


@dataclass(frozen=True)
class Uniform:
    """Uniform in (low, high)."""

    low: float
    high: float

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fills a whole tensor with torch's generator; returns it."""
        return nn.init.uniform_(tensor, self.low, self.high)


@dataclass(frozen=True)
class LogUniform:
    """The logarithm of a number that is uniform in (low, high)."""

    low: float
    high: float

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fills a whole tensor with torch's generator; returns it."""
        return nn.init.uniform_(tensor, self.low, self.high).log_()


@dataclass(frozen=True)
class EachOf:
    """Applies an initialiser to each tensor of a stack along the first dimension."""

    init: Initializer

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fills each tensor of the stack; returns the stack."""
        for part in tensor:
            self.init(part.view(-1, part.shape[-1]))
        return tensor


def each_of(init: Initializer) -> Initializer:
    """Returns an initialiser of a stack of tensors [n, ..., in], in which `init` draws each as a matrix [out, in]."""
    if isinstance(init, Normal | Constant):
        return init
    return dataclasses.replace(init, stacked=1) if isinstance(init, XavierUniform) else EachOf(init)


def init_method_normal(sigma: float) -> Normal:
    """Megatron-LM's name of `Normal`."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Normal:
    """Returns the initializer of output projections: a normal distribution of sigma / sqrt(multiplier num_layers)."""
    return Normal(sigma / math.sqrt(multiplier * num_layers))
