"""Comparisons of versions."""

import importlib.metadata

import pytest

from megatron.core.utils import get_te_version, get_torch_version, is_te_min_version, is_torch_min_version
from megatron.core.utils.versions import jit_fuser


def test_torch() -> None:
    assert is_torch_min_version("2.0.0") and not is_torch_min_version("99.0")
    assert is_torch_min_version(str(get_torch_version())) and not is_torch_min_version(str(get_torch_version()), False)


def test_transformer_engine_that_is_not_installed_is_older_than_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    get_te_version.cache_clear()
    assert not is_te_min_version("0.1")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.10.0+abc")
    get_te_version.cache_clear()
    assert is_te_min_version("1.9.0") and not is_te_min_version("1.11.0")
    get_te_version.cache_clear()


def test_the_decorator_keeps_the_function() -> None:
    assert jit_fuser(len) is len
