"""The names of bulk copies in each release of Triton."""

import importlib

import pytest
from triton.experimental.gluon.language.nvidia.hopper import tma

from megatron.core.ops import gluon_copies

NAMES = {
    "load_bulk": ("async_load", "async_copy_global_to_shared"),
    "store_bulk": ("async_store", "async_copy_shared_to_global"),
}


@pytest.mark.parametrize("newer", [True, False])
def test_either_names_of_triton_are_used(newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {}
    for name, spellings in NAMES.items():
        monkeypatch.delattr(tma, spellings[newer], raising=False)
        marks[name] = object()
        monkeypatch.setattr(tma, spellings[not newer], marks[name], raising=False)
    if not newer:
        monkeypatch.delattr(tma, "async_atomic_add", raising=False)
    try:
        found = importlib.reload(gluon_copies)
        assert {name: getattr(found, name) for name in NAMES} == marks
        assert newer or found.add_bulk is found._add_shared
    finally:
        monkeypatch.undo()
        importlib.reload(gluon_copies)
