"""Base class of the library's modules, and the wrapper that runs a model in half precision."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.sharded_state import ShardedStateModule
from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(ShardedStateModule):
    """Base class of modules with a TransformerConfig."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, object]:
        """Returns the state dict of this module, for Megatron-LM's checkpoint functions."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)


class Float16Module(MegatronModule):
    """Runs a model in the float16 or bfloat16 of its `config`: casts floating-point inputs to that type and outputs to
    float32. The state dict is that of the model, without a prefix."""

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        super().__init__(config)
        assert config.fp16 or config.bf16, "Float16Module needs config.fp16 or config.bf16"
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        self.module = module.to(self.dtype)

    def set_input_tensor(self, input_tensor: object) -> None:
        """Calls the model's own `set_input_tensor`."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """Returns the model's output; on the last stage, with `fp32_output`, in float32 at least."""
        inputs = convert(inputs, lambda tensor: tensor.to(self.dtype))
        output = self.module(*inputs, **kwargs)
        if fp32_output and getattr(self.module, "post_process", True):
            output = convert(output, lambda tensor: tensor.float() if tensor.dtype is self.dtype else tensor)
        return output

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the model's state dict."""
        return self.module.state_dict(*args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", *args: object, **kwargs: object) -> dict[str, Any]:
        """Returns the model's sharded state dict."""
        return self.module.sharded_state_dict(prefix, *args, **kwargs)  # type: ignore[operator]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> object:
        """Loads the state dict into the model."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def convert(value: object, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies a function to every floating-point tensor in nested tuples and lists."""
    if isinstance(value, tuple | list):
        return type(value)(convert(item, function) for item in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return function(value)
    return value
