"""Attributes of a model inside its wrappers (data parallel, half precision, torch.compile)."""

from collections.abc import Iterator
from typing import Any

from torch import nn


def get_attr_wrapped_model(model: nn.Module, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """Returns the attribute of the outermost of model, model.module, ... that has it; with `return_model_obj` that
    module itself. Without `allow_none` an attribute that is None counts as missing. Raises RuntimeError if a list is
    given or no module has the attribute."""
    if isinstance(model, list):
        raise RuntimeError(f"get_attr_wrapped_model was given a list of models; give one model, to read {attr!r}")
    for module in _unwrapping(model):
        if hasattr(module, attr) and (allow_none or getattr(module, attr) is not None):
            return module if return_model_obj else getattr(module, attr)
    raise RuntimeError(f"no attribute {attr!r} in {type(model).__name__} or in the modules that it wraps")


def get_model_config(model: nn.Module) -> Any:
    """Returns the `config` of a model, wrapped or not. Raises RuntimeError if there is none."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def unwrap_model(model: Any, module_instances: type | tuple[type, ...] | None = None) -> Any:
    """Returns the innermost module of model, model.module, ..., or the first that is not of the given classes of
    wrappers. A list gives a list."""
    if isinstance(model, list):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    wrappers: Any = module_instances or nn.Module
    while isinstance(model, wrappers) and isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def _unwrapping(model: Any) -> Iterator[Any]:
    while model is not None:
        yield model
        model = getattr(model, "module", None)
