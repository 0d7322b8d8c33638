"""Kernels in Gluon, Triton's experimental language with explicit layouts and barriers, where this Triton has it."""

import functools
from importlib import import_module
from types import ModuleType

import triton

GLUON_RELEASES = ((3, 6), (3, 9))
"""First and last release of Triton that our kernels in Gluon have been compiled with. The language's functions change
from release to release."""


@functools.cache
def gluon_kernel(name: str) -> ModuleType | None:
    """Returns the module `megatron.core.ops.<name>`, or None if this Triton cannot compile its kernels."""
    if not GLUON_RELEASES[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= GLUON_RELEASES[1]:
        return None
    try:
        return import_module(f"megatron.core.ops.{name}")
    except ImportError:  # builds of Triton for other systems leave Gluon out
        return None
