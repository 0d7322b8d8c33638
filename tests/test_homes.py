"""Old homes of Megatron-LM's names: made when a script imports them, with one definition of each name."""

import importlib
import sys
from collections.abc import Iterator
from typing import Union

import pytest
from support.each import for_each

from megatron.core.exceptions import UserError
from megatron.homes import OLD_HOMES, NotHere, OldHomes, lazy_names, look_up


def entries() -> Iterator[tuple[str, str]]:
    for module, home in OLD_HOMES.items():
        yield from ((module, name) for name in (home if isinstance(home, dict) else ()))


@for_each(entries())
def test_every_name_of_the_table_can_be_imported(entry: tuple[str, str]) -> None:
    module, name = entry
    assert getattr(importlib.import_module(module), name) is not None


def test_an_old_home_has_no_definition_of_its_own() -> None:
    from megatron import get_args
    from megatron.training.global_vars import get_args as defined
    from megatron.training.tokenizer.null import NullTokenizer
    from megatron.training.tokenizer.tokenizer import _NullTokenizer  # type: ignore[import-not-found]
    from megatron.utils import print_rank_0  # type: ignore[import-not-found]

    assert get_args is defined and _NullTokenizer is NullTokenizer
    assert print_rank_0 is importlib.import_module("megatron.training.utils").print_rank_0


def test_a_package_gives_its_old_modules_as_attributes() -> None:
    import megatron

    for name in [name for name in sys.modules if name.startswith("megatron.legacy")]:
        del sys.modules[name]
    megatron.__dict__.pop("legacy", None)
    assert megatron.legacy.model.T5Model.__name__ == "T5Model"


def test_a_name_without_a_meaning_is_refused_when_it_is_used() -> None:
    from megatron.legacy.model import GPTModel  # type: ignore[import-not-found]

    assert Union[GPTModel, int] is not None  # noqa: UP007  # as in scripts' annotations
    with pytest.raises(UserError, match=r"GPTModel\(...\): .* --use-mcore-models"):
        GPTModel(None, num_tokentypes=0)
    with pytest.raises(UserError, match=r"X\.make: do that"):
        NotHere("do that").stand_in("X").make()
    assert not hasattr(NotHere("do that").stand_in("X"), "__wrapped__")  # inspect and pickle ask for such names


def test_what_is_not_in_the_table_does_not_exist() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megatron.post_training.checkpointing")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        look_up("megatron.legacy.model", "nothing")
    assert OldHomes().find_spec("megatron.training.training") is None


def test_a_lazy_name_is_imported_at_its_first_use() -> None:
    get = lazy_names("package", {"a": "json:", "dumps": "json", "read": "json:loads", "x": "no_such_module_anywhere"})
    json = importlib.import_module("json")
    assert (get("a"), get("dumps"), get("read")) == (json, json.dumps, json.loads)
    with pytest.raises(ModuleNotFoundError):
        get("x")
    with pytest.raises(AttributeError, match="'package' has no attribute 'b'"):
        get("b")
