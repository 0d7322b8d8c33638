"""Finding Transformer Engine, and our fp8 flags as its recipes."""

import importlib.util

import pytest
import torch
from support import fake_transformer_engine as fake

from megatron.core.exceptions import UserError
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.recipes import Fp8Settings
from megatron.core.ops.transformer_engine import engine
from megatron.core.ops.transformer_engine.engine import find_engine, quantized_forward, recipe_of


def test_without_a_gpu_it_is_not_looked_for() -> None:
    assert torch.cuda.is_available() or find_engine() == "there is no GPU"


def test_it_is_used_where_there_is_a_gpu_and_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed[0] else None)
    monkeypatch.setattr(engine, "_import_engine", lambda: fake.FAKE)
    assert find_engine() == "it is not installed"
    installed[0] = True
    assert find_engine() is fake.FAKE


def test_flags_are_fields_of_recipes() -> None:
    e4m3, hybrid = FORMATS["e4m3"], FORMATS["hybrid"]
    delayed = Fp8Settings("delayed", hybrid, margin=1, history_len=16, amax_algo="max")
    expected = fake.DelayedScaling(1, fake.Format.HYBRID, 16, "max", None, reduce_amax=False)
    assert recipe_of(fake.FAKE, delayed) == expected
    assert recipe_of(fake.FAKE, Fp8Settings("tensorwise", e4m3)) == fake.Float8CurrentScaling(fake.Format.E4M3)
    assert recipe_of(fake.FAKE, Fp8Settings("blockwise", hybrid)) == fake.Float8BlockScaling(fake.Format.HYBRID)
    assert recipe_of(fake.FAKE, None) is None


@pytest.mark.parametrize(
    ("recipe", "more", "flag"),
    [
        ("mxfp8", {}, "--fp8-recipe mxfp8"),
        ("tensorwise", {"margin": 2}, "--fp8-margin 2"),
        ("delayed", {"wgrad": False}, "--disable-fp8-wgrad"),
    ],
)
def test_what_no_recipe_has_is_refused(recipe: str, more: dict, flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        recipe_of(fake.FAKE, Fp8Settings(recipe, FORMATS["hybrid"], **more))


def test_delayed_scales_are_updated_once_for_a_whole_forward() -> None:
    recipe = recipe_of(fake.FAKE, Fp8Settings("delayed", FORMATS["hybrid"]))
    before = fake.exits
    with quantized_forward(fake.FAKE, recipe):
        for inner in (recipe, None, recipe):
            with quantized_forward(fake.FAKE, inner):
                assert fake._recipes[-1] is inner
    assert fake.exits == before + 1
