"""Memory and initial values for a model that was built on the meta device.

On the meta device a model has only shapes and descriptors. An initial value is a function of the parameter's name and
the index of the element, so units can be initialised one after the other. With sharded parameters only one unit at a
time is whole, so a model that does not fit on one rank can be built.
"""

import torch
from torch import nn

from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.parameters import has_initial_value, info_of, initialize_parameter


def materialize(parameter: nn.Parameter, device: torch.device, config: ModelParallelConfig) -> None:
    """Gives a parameter on the meta device memory and its initial value. Does nothing for a parameter with memory, and
    if `device` is the meta device too: then only sizes are counted.

    Raises UserError if the descriptor has no initial value.
    """
    if parameter.device.type != "meta" or device.type == "meta":
        return
    info = info_of(parameter)
    if not has_initial_value(info):
        raise UserError(
            f"{info.name} was built on the meta device, and only its own module knows its initial value: declare it "
            "(megatron.core.parameters.declare), or leave out --init-model-with-meta-device"
        )
    real = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)  # all references to the parameter now refer to the real one
    if getattr(config, "perform_initialization", True):
        initialize_parameter(parameter, config.seed)


def materialize_rest(module: nn.Module, device: torch.device, config: ModelParallelConfig) -> None:
    """Materialises the parameters that belong to no unit. Raises UserError for a buffer on the meta device, which has
    lost its values."""
    for parameter in module.parameters():
        materialize(parameter, device, config)
    for name, buffer in module.named_buffers():
        if buffer.device.type == "meta" != device.type:
            raise UserError(
                f"the buffer {name} was built on the meta device, where it has no values: leave out "
                "--init-model-with-meta-device"
            )
