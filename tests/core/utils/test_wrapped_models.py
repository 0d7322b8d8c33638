"""Attributes of wrapped models."""

from types import SimpleNamespace

import pytest
from torch import nn

from megatron.core.utils import get_attr_wrapped_model, get_model_config, unwrap_model

MODEL = SimpleNamespace(config="settings", vp_stage=None)
WRAPPED = SimpleNamespace(module=SimpleNamespace(module=MODEL, config=None))


def test_an_attribute_is_found_inside_wrappers() -> None:
    assert get_attr_wrapped_model(WRAPPED, "vp_stage") is None  # type: ignore[arg-type]
    assert get_model_config(WRAPPED) == "settings"  # type: ignore[arg-type]
    assert get_attr_wrapped_model(WRAPPED, "config", allow_none=False, return_model_obj=True) is MODEL  # type: ignore[arg-type]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(RuntimeError, match="no attribute 'weight' in SimpleNamespace"):
        get_attr_wrapped_model(WRAPPED, "weight")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no attribute 'vp_stage'"):
        get_attr_wrapped_model(WRAPPED, "vp_stage", allow_none=False)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a list of models"):
        get_attr_wrapped_model([WRAPPED], "config")  # type: ignore[arg-type]


def test_wrappers_are_taken_off() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class Other(Wrapper):
        pass

    model = nn.Linear(1, 1)
    assert unwrap_model([Wrapper(Other(model)), model]) == [model, model]
    inner = Wrapper(model)
    assert unwrap_model(Other(inner), Other) is inner
