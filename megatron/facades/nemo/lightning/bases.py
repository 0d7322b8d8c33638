"""The classes that users and Lightning's own Trainer expect: Lightning's where it is in use, small ones otherwise.

Importing Lightning takes seconds, so nothing here imports it. A script that uses Lightning has imported it before it
makes an object of this package, and the object then is an instance of Lightning's class too (`with_lightning`).
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Mapping

from torch import nn

_LIGHTNING = "lightning.pytorch"


def with_lightning(cls: type, module: str, name: str) -> type:
    """Returns `cls`, or a subclass of it and of Lightning's class `module`.`name` if Lightning has been imported."""
    base = getattr(sys.modules.get(f"{_LIGHTNING}.{module}"), name, None)
    return cls if base is None or issubclass(cls, base) else _mixed(cls, base)


@functools.cache
def _mixed(cls: type, base: type) -> type:
    return types.new_class(cls.__name__, (cls, base), exec_body=lambda body: body.update(__module__=cls.__module__))


def is_of_lightning(cls: type) -> bool:
    """Whether Lightning, or this package in its place, defines a class."""
    return cls.__module__.startswith(("lightning.", "pytorch_lightning.", __name__)) or cls is object


def defines(obj: object, name: str) -> bool:
    """Whether an object has a method or attribute `name` of its own, not only the empty one of Lightning's class."""
    if name in getattr(obj, "__dict__", ()):
        return True
    return any(name in vars(cls) for cls in type(obj).__mro__ if not is_of_lightning(cls) and cls is not nn.Module)


class Callback:
    """A base class of callbacks, for programs without Lightning. The trainer calls the methods that are defined."""


class LightningModule(nn.Module):
    """A base class of modules, for programs without Lightning."""

    trainer: object = None

    def log(self, name: str, value: object, **how: object) -> None:
        """Keeps a value for the log and for `trainer.callback_metrics`. The trainer replaces this method."""

    def log_dict(self, dictionary: Mapping[str, object], **how: object) -> None:
        """Calls `log` for each entry."""
        for name, value in dictionary.items():
            self.log(name, value, **how)


class LightningDataModule:
    """A base class of data modules, for programs without Lightning."""

    trainer: object = None

    def prepare_data(self) -> None:
        """Called on every rank before `setup`."""

    def setup(self, stage: str) -> None:
        """Called on every rank before the data are opened. `stage`: fit, validate or test."""

    def teardown(self, stage: str) -> None:
        """Called after the run."""


_PLAIN: Mapping[str, type] = {
    "Callback": Callback,
    "LightningDataModule": LightningDataModule,
    "LightningModule": LightningModule,
}


def base_class(name: str) -> type:
    """Returns the class `name` that a user's class derives from: Lightning's if it is installed, which imports it. The
    `__getattr__` of a module that offers these classes. Raises AttributeError for another name."""
    if name not in _PLAIN:
        raise AttributeError(f"no attribute {name!r}")
    if importlib.util.find_spec("lightning") is None:
        return _PLAIN[name]
    found: type = getattr(importlib.import_module("lightning.pytorch"), name)
    return found
