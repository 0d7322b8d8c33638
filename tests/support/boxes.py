"""Compares the parameters of a model that is split over ranks with whole tensors, by their descriptors."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.parameters import info_of


def whole_values(model: nn.Module) -> dict[str, Tensor]:
    """Returns the canonical tensors of a model on one rank, by canonical name, without padding."""
    return {info_of(p).name: _box(p.detach(), p) for p in model.parameters()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of the same tensors."""
    return {info_of(p).name: _box(p.grad, p) for p in model.parameters()}


def _box(tensor: Tensor, parameter: Tensor) -> Tensor:
    info = info_of(parameter)
    return tensor.reshape(-1)[: info.box.numel].view(info.box.shape).clone()


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Returns the box of a canonical tensor that the parameter holds."""
    box = info_of(parameter).box
    for dim, (start, extent) in enumerate(zip(box.start, box.shape, strict=True)):
        whole = whole.narrow(dim, start, extent)
    return whole


@torch.no_grad()
def fill(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Sets each parameter to its part of the canonical values, and padding to 100, so that a use of padding shows."""
    for parameter in model.parameters():
        info = info_of(parameter)
        flat = parameter.view(-1)
        flat[: info.box.numel] = part_of(values[info.name], parameter).reshape(-1)
        flat[info.box.numel :] = 100.0


def gradient_errors(model: nn.Module, gradients: dict[str, Tensor], tp_group) -> dict[str, float]:
    """Returns the largest |difference| / |reference| of each gradient, after partial ones are summed over `tp_group`.

    Raises AssertionError if padding has a gradient.
    """
    errors = {}
    for parameter in model.parameters():
        info = info_of(parameter)
        assert parameter.grad is not None, info.name
        gradient = parameter.grad.clone()
        if "tp" in info.partial_gradient_axes:
            dist.all_reduce(gradient, group=tp_group)
        assert not gradient.view(-1)[info.box.numel :].any(), f"{info.name}: gradient of padding"
        name = f"{info.name} ({'shared' if info.part_of else 'own'})"
        errors[name] = error(_box(gradient, parameter), part_of(gradients[info.name], parameter))
    return errors


def error(ours: Tensor, expected: Tensor) -> float:
    """Returns the largest |difference| divided by the largest |reference|."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype, (ours.shape, expected.shape, ours.dtype)
    if not expected.numel():
        return 0.0
    return ((ours - expected).abs().max() / expected.abs().max()).item()
