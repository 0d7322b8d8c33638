"""The operations of experts and their router, as a record."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from megatron.core.ops.activation import weighted_activation
from megatron.core.ops.moe.grouped_linear import grouped_bias, grouped_linear
from megatron.core.ops.moe.permute import ChoiceNumbers, permute, unpermute
from megatron.core.ops.moe.routing import Choice, best, choose_and_count, choose_experts, router_logits
from megatron.core.ops.moe.shared import ReadInput, add_shared, read_input
from megatron.core.ops.records import Ops, on_gpus, operation


@dataclass(frozen=True)
class ExpertOps(Ops):
    """Routing, movement and products of the tokens of experts, and the activation of every MLP."""

    grouped_linear: Callable[..., Tensor] = operation(grouped_linear, "experts")
    grouped_bias: Callable[..., Tensor] = operation(grouped_bias, "experts")
    router_logits: Callable[..., Tensor] = operation(router_logits, "experts")
    best: Callable[[Tensor, int], Tensor] = operation(best, "experts")
    choose_experts: Callable[..., tuple[Tensor, Tensor]] = operation(choose_experts, "experts")
    choose_and_count: Callable[..., Choice] = operation(choose_and_count, "experts")
    number_choices: Callable[[Tensor, int], ChoiceNumbers] = operation(ChoiceNumbers, "experts")
    permute: Callable[..., Tensor] = operation(permute, "experts")
    unpermute: Callable[..., Tensor] = operation(unpermute, "experts")
    read_input: Callable[..., ReadInput] = operation(read_input, "experts")
    add_shared: Callable[..., Tensor] = operation(add_shared, "experts")
    weighted_activation: Callable[..., Tensor] = operation(weighted_activation, "activations")

    @classmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs."""
        from megatron.core.ops.moe import (
            grouped_linear_triton,
            permute_triton,
            routing_triton,
            shared_triton,
            weighted_activation_triton,
        )

        modules = permute_triton, routing_triton, shared_triton, weighted_activation_triton
        record = on_gpus(
            cls(),
            *modules,
            grouped_linear=grouped_linear_triton.grouped_linear_cuda,
            grouped_bias=grouped_linear_triton.grouped_bias_cuda,
            number_choices=permute_triton.ChoiceNumbersTriton,
            router_logits=functools.partial(router_logits, parts=routing_triton.bfloat16_parts_triton),
        )
        return record.with_noting("weighted_activation", "permute", "unpermute")
