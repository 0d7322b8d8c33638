"""Specs name classes; building them passes what the class asks for."""

import pytest
from torch import nn

from megatron.core.exceptions import UserError
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module, import_module


class Part(nn.Module):
    def __init__(self, size: int, submodules: object = None, colour: str = "red") -> None:
        super().__init__()
        self.made_with = (size, submodules, colour)


def function(x: int) -> int:
    return x + 1


def test_build_module() -> None:
    assert build_module(Part, 3).made_with == (3, None, "red")
    spec = ModuleSpec(Part, params={"colour": "blue"}, submodules="parts")
    assert build_module(spec, 3).made_with == (3, "parts", "blue")
    assert build_module(ModuleSpec(("torch.nn", "Linear")), 3, 4).weight.shape == (4, 3)
    assert build_module(function) is function and build_module(ModuleSpec(function)) is function


def test_what_is_offered_is_passed_to_who_asks() -> None:
    assert build_module(Part, 3, offer={"colour": "green", "weight": 5}).made_with == (3, None, "green")
    assert build_module(ModuleSpec(Part, {"colour": "blue"}), 3, offer={"colour": "green"}).made_with[2] == "blue"


def test_import_module() -> None:
    assert import_module(("torch.nn", "Linear")) is nn.Linear is get_module(ModuleSpec(("torch.nn", "Linear")))
    with pytest.raises(UserError, match=r"\(torch.nn, Nothing\)"):
        import_module(("torch.nn", "Nothing"))


def test_a_constructor_that_passes_keywords_on_takes_those_of_its_base() -> None:
    class Passing(Part):
        def __init__(self, *args: object, rank: int = 4, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    class Own(Passing):
        def __init__(self, size: int) -> None:
            super().__init__(size)

    assert build_module(Passing, 3, offer={"colour": "green", "weight": 5}).made_with == (3, None, "green")
    assert build_module(Own, 3, offer={"colour": "green"}).made_with == (3, None, "red")
