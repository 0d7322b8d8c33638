"""NeMo 2's names for pretraining scripts: `from megatron.facades.nemo import lightning as nl, llm, run`.

They start the run that pretrain_gpt.py starts. `install()` makes scripts work that import `nemo` and `nemo_run`.
"""

import importlib
import importlib.util
import logging as logging
import sys
from types import ModuleType

from megatron.core.exceptions import UserError

_HERE = __name__
_NEMO, _NEMO_RUN = "nemo", "nemo_run"
_LIGHTNING = f"{_HERE}.lightning"
_CALLBACKS = f"{_LIGHTNING}.run_callbacks", f"{_LIGHTNING}.folders", f"{_LIGHTNING}.bases"
_RECIPES = f"{_HERE}.llm.recipes"

PATHS: dict[str, tuple[str, ...]] = {
    "nemo": (_HERE,),
    "nemo.lightning": (_LIGHTNING,),
    "nemo.lightning.megatron_parallel": (f"{_LIGHTNING}.megatron_parallel", f"{_LIGHTNING}.loss"),
    "nemo.lightning.nemo_logger": (f"{_LIGHTNING}.folders",),
    "nemo.lightning.resume": (f"{_LIGHTNING}.folders",),
    "nemo.lightning.pytorch": (_LIGHTNING,),
    "nemo.lightning.pytorch.callbacks": _CALLBACKS,
    **{
        f"nemo.lightning.pytorch.callbacks.{name}": _CALLBACKS
        for name in ("flops_callback", "garbage_collection", "megatron_comm_overlap", "model_checkpoint", "nsys")
    },
    "nemo.lightning.pytorch.optim": (f"{_LIGHTNING}.optim", f"{_LIGHTNING}.lr_scheduler"),
    "nemo.lightning.pytorch.optim.lr_scheduler": (f"{_LIGHTNING}.lr_scheduler",),
    "nemo.lightning.pytorch.optim.megatron": (f"{_LIGHTNING}.optim",),
    "nemo.lightning.pytorch.plugins": (f"{_LIGHTNING}.precision", f"{_LIGHTNING}.data"),
    "nemo.lightning.pytorch.strategies": (f"{_LIGHTNING}.strategy",),
    "nemo.lightning.pytorch.trainer": (f"{_LIGHTNING}.trainer",),
    "nemo.lightning.io": (f"{_LIGHTNING}.io",),
    "nemo.utils": (_HERE,),
    "nemo.utils.exp_manager": _CALLBACKS,
    "nemo.collections": (_HERE,),
    "nemo.collections.llm": (f"{_HERE}.llm",),
    "nemo.collections.llm.api": (f"{_HERE}.llm.api",),
    "nemo.collections.llm.gpt": (f"{_HERE}.llm.gpt",),
    "nemo.collections.llm.gpt.data": (f"{_HERE}.llm.data",),
    "nemo.collections.llm.gpt.data.mock": (f"{_HERE}.llm.data",),
    "nemo.collections.llm.gpt.data.pre_training": (f"{_HERE}.llm.data",),
    "nemo.collections.llm.gpt.model": (f"{_HERE}.llm",),
    "nemo.collections.llm.gpt.model.base": (f"{_HERE}.llm",),
    "nemo.collections.llm.gpt.model.llama": (f"{_HERE}.llm",),
    "nemo.collections.llm.recipes": (_RECIPES,),
    "nemo.collections.llm.recipes.log.default": (_RECIPES,),
    "nemo.collections.llm.recipes.optim.adam": (_RECIPES,),
    "nemo.collections.llm.recipes.precision.mixed_precision": (_RECIPES,),
    "nemo.collections.common.tokenizers": (f"{_HERE}.llm.tokenizer",),
    "nemo.collections.nlp.modules.common.tokenizer_utils": (f"{_HERE}.llm.tokenizer",),
}
"""NeMo's modules, and those of this package that have their names."""


class _Alias(ModuleType):
    """A module of NeMo. Its names are those of the modules that it stands for; another name is an ImportError that says
    so."""

    def __init__(self, name: str, homes: tuple[str, ...]) -> None:
        super().__init__(name, f"{name}, served by {', '.join(homes)}.")
        self.__path__: list[str] = []
        self._homes = homes

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        for home in self._homes:
            found = getattr(importlib.import_module(home), name, None)
            if found is not None:
                return found
        pages = "docs/frameworks.md lists what is"
        raise AttributeError(f"{self.__name__}.{name} is not part of megatron.facades.nemo; {pages}")


def install() -> None:
    """Makes `from nemo import lightning as nl`, `from nemo.collections import llm` and `import nemo_run as run` work
    without NeMo and NeMo-Run. NeMo-Run is left as it is where it is installed. Raises UserError if NeMo is imported or
    installed: its own classes would be mixed with these."""
    if isinstance(sys.modules.get(_NEMO), _Alias):
        return
    if _NEMO in sys.modules or importlib.util.find_spec(_NEMO) is not None:
        raise UserError("megatron.facades.nemo.install(): NeMo is installed; use it, or uninstall nemo_toolkit")
    for name, homes in PATHS.items():
        for parent in _parents(name):
            sys.modules.setdefault(parent, _Alias(parent, (_HERE,)))
        sys.modules[name] = _Alias(name, homes)
    for name in sys.modules.keys() & {parent for path in PATHS for parent in (path, *_parents(path))}:
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, sys.modules[name])
    if importlib.util.find_spec(_NEMO_RUN) is None:
        sys.modules[_NEMO_RUN] = importlib.import_module(f"{_HERE}.run")


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
