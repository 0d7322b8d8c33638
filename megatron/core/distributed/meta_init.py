"""Memory and values for a model that was built without.

On the meta device a model has shapes and descriptors only. Initial values are functions of a parameter's name and of
the elements at hand, so units get theirs one after the other: where parameters are sharded, one unit at a time is
whole, and a model is built that no rank could hold.
"""

from typing import Any

import torch
from torch import nn

from megatron.core.exceptions import UserError
from megatron.core.parameters import has_initial_value, info_of, initialize_parameter


def materialize(parameter: nn.Parameter, device: torch.device, config: Any) -> None:
    """Give a parameter on the meta device memory and its initial value; one that has memory is left alone.

    `config` has `seed` and `perform_initialization`. Raises UserError where the descriptor does not say what the
    parameter starts from.
    """
    if parameter.device.type != "meta":
        return
    info = info_of(parameter)
    if not has_initial_value(info):
        raise UserError(
            f"{info.name} was built on the meta device, and only its own module knows its initial value: declare it "
            "(megatron.core.parameters.declare), or leave out --init-model-with-meta-device"
        )
    real = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)  # whoever holds the parameter has the real one now
    if getattr(config, "perform_initialization", True):
        initialize_parameter(parameter, config.seed)


def materialize_rest(module: nn.Module, device: torch.device, config: Any) -> None:
    """The parameters that belong to no unit. Raises UserError for a buffer, whose values are lost."""
    for parameter in module.parameters():
        materialize(parameter, device, config)
    for name, buffer in module.named_buffers():
        if buffer.device.type == "meta":
            raise UserError(
                f"the buffer {name} was built on the meta device, where it has no values: leave out "
                "--init-model-with-meta-device"
            )
