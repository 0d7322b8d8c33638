"""Specs: the classes of a model's parts. Sizes come from the config."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.keywords import Keywords


@dataclass
class ModuleSpec:
    """A class (or its import path), keywords for its constructor, and the specs of its parts."""

    module: tuple[str, ...] | Callable[..., Any]
    """A class, a function, or (module path, name)."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keywords of the constructor in addition to those of the builder."""
    submodules: Any = None
    """Specs of the parts, in the form that the class expects."""
    metainfo: dict[str, Any] = field(default_factory=dict)


Spec = ModuleSpec | Callable[..., Any]
"""A spec, a class, or a function that is used as it is."""


def import_module(module_path: tuple[str, ...]) -> Any:
    """Returns the object `name` of (module path, name). Raises UserError if there is none."""
    path, name = module_path
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"spec ({path}, {name}) names nothing that can be imported: {error}") from error


def get_module(spec_or_module: Spec, **additional_kwargs: Any) -> Any:
    """Returns the class or function of a spec, without building it."""
    module = spec_or_module.module if isinstance(spec_or_module, ModuleSpec) else spec_or_module
    return import_module(module) if isinstance(module, tuple) else module


def build_module(spec_or_module: Spec, *args: Any, offer: Mapping[str, Any] | None = None, **kwargs: object) -> Any:
    """Builds a spec. A function is returned as it is, without calling it. `offer` holds keywords that are passed only
    if the constructor declares them, so that a user's class needs no parameters beyond Megatron-LM's."""
    module = get_module(spec_or_module)
    if not isinstance(module, type):
        return module
    if isinstance(spec_or_module, ModuleSpec):
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
        kwargs |= spec_or_module.params
    if offer:
        kwargs = Keywords.of_constructor(module).chosen_from(offer) | kwargs
    return module(*args, **kwargs)
