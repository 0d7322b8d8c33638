"""A linear layer that is replicated on every tensor parallel rank."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import Group
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.initializers import Constant
from megatron.core.ops.fp8.recipes import LinearSplit
from megatron.core.tensor_parallel.layers import drop_empty_extra_state
from megatron.core.tensor_parallel.sharded_state import ShardedStateModule
from megatron.core.tensor_parallel.storage import new_parameter


class ReplicatedLinear(ShardedStateModule):
    """Computes y = x W^T + b with all of W [output_size, input_size] on every rank. `forward` returns (y, None), or (x
    W^T, b) with `skip_bias_add`.

    Under `config.sequence_parallel` each rank computes its own tokens; only the weight's gradient is summed, once per
    step. This pays off for a layer that is narrow compared to its number of tokens. Without sequence parallelism, or
    with `input_is_whole`, all ranks compute the same result. `gather_output`, `is_expert`, `tp_comm_buffer_name` and
    `tp_group` have no effect; they let this class replace a `ColumnParallelLinear`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        gather_output: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Group = None,
        input_is_whole: bool = False,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        self.config, self.input_size, self.output_size = config, input_size, output_size
        self.skip_bias_add = skip_bias_add
        self.backend = backend or choose_backend(config)
        self.register_load_state_dict_pre_hook(drop_empty_extra_state)
        by_token = config.sequence_parallel and not input_is_whole
        facts: dict[str, Any] = {"partial_gradient_axes": frozenset({"tp"} if by_token else ())}
        self.weight = new_parameter(config, (output_size, input_size), init_method, **facts)
        self.register_parameter("bias", None)
        if bias:
            self.bias = new_parameter(config, (output_size,), Constant(0.0), **facts)
        split = LinearSplit(tokens=(tp_group,) if config.sequence_parallel else ())
        self.linear = self.backend.make_linear(split, self.weight)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns ([..., output_size], bias or None) for [..., input_size]."""
        output = self.linear(input_, self.weight, None if self.skip_bias_add else self.bias)
        return output, self.bias if self.skip_bias_add else None
