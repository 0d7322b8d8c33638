"""Versions of torch and of Transformer Engine, for scripts that choose by them."""

import functools
import importlib.metadata
from typing import TypeVar

import torch
from torch.torch_version import TorchVersion

Function = TypeVar("Function")


MEGATRON_LM_RELEASE = "0.16.1"
"""The release of Megatron-LM whose public names are here; `megatron.core.__version__` of scripts."""


def get_torch_version() -> TorchVersion:
    """Returns torch's version; it compares with strings."""
    return TorchVersion(torch.__version__)


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Returns whether torch's version is at least `version`; larger without `check_equality`."""
    return _at_least(get_torch_version(), version, check_equality)


@functools.cache
def get_te_version() -> TorchVersion:
    """Returns Transformer Engine's version; 0 if it is not installed. Does not import it."""
    try:
        return TorchVersion(importlib.metadata.version("transformer-engine"))
    except importlib.metadata.PackageNotFoundError:
        return TorchVersion("0")


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Returns whether Transformer Engine is installed in at least this version; in a later one without
    `check_equality`."""
    return _at_least(get_te_version(), version, check_equality)


def _at_least(found: TorchVersion, version: str, or_equal: bool) -> bool:
    return bool(found >= version if or_equal else found > version)


def jit_fuser(function: Function) -> Function:
    """Decorator of Megatron-LM that requests fusion. Returns the function unchanged, because our own operations choose
    their kernels themselves, and torch.compile can be applied to a whole model."""
    return function
