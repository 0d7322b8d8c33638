"""Where Megatron-LM's public names are defined, for scripts that import them from another module.

A name is defined once. Three tables, two of them in homes.toml, lead to the definitions:

- `lazy_names` gives a package names of its modules, which are imported when the name is first used;
- `MOVED` lists modules that have another path now; both paths give the same module;
- `OLD_HOMES` lists modules that do not exist here and that scripts of Megatron-LM's releases import. This table is the
  only place for them: a module of the table is made when a script imports it. Our own code does not import them.

A name that has no meaning here (`NotHere`) can be imported and used in annotations. Calling it raises UserError with
what to do instead.
"""

import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package: imports a name from its module in `homes` at the first use. The value
    "module:name" renames it; "module:" is the module itself."""

    def get(name: str) -> Any:
        if name in homes:
            return _resolve(homes[name], name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def _resolve(home: str, name: str) -> Any:
    module, renamed, original = home.partition(":")
    found = importlib.import_module(module)
    return found if renamed and not original else getattr(found, original or name)


# ---------------------------------------------------------------------------------------------------------------------
# Names without a meaning here


@dataclass(frozen=True)
class NotHere:
    """A name of Megatron-LM that cannot be served. `advice`: what to do instead, as a sentence."""

    advice: str

    def stand_in(self, name: str) -> type:
        """Returns a class of this name. Its construction, and reading an attribute of it, raise UserError."""
        return _Refusing(name.rpartition(".")[2], (), {"__doc__": f"Not here: {self.advice}", "advice": self.advice})


class _Refusing(type):
    advice: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _refusal(f"{cls.__name__}(...): {cls.advice}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refusal(f"{cls.__name__}.{name}: {cls.advice}")


def _refusal(message: str) -> Exception:
    return importlib.import_module("megatron.core.exceptions").UserError(message)


# ---------------------------------------------------------------------------------------------------------------------
# Old homes

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_NOT_HERE = {name: NotHere(advice) for name, advice in _TABLES["not_here"].items()}

OLD_HOMES: dict[str, str | dict[str, str | NotHere]] = _TABLES["replaced"] | {
    module: {name: _NOT_HERE[home[1:]] if home.startswith("!") else home for name, home in names.items()}
    for module, names in _TABLES["names"].items()
}
"""Old module: the module that replaces it, or its names, each with "module", "module:name" or `NotHere`."""
_TE = "megatron.core.extensions.transformer_engine"
OLD_HOMES["megatron.core.transformer.custom_layers.transformer_engine"] = OLD_HOMES[_TE]


def look_up(module: str, name: str) -> Any:
    """Returns the object that `module.name` stands for, as `OLD_HOMES` says. Raises AttributeError if it is not in the
    table."""
    home = OLD_HOMES.get(module, {})
    if isinstance(home, str):
        return getattr(importlib.import_module(home), name)
    if name in home:
        found = home[name]
        made = found.stand_in(name) if isinstance(found, NotHere) else _resolve(found, name)
        setattr(sys.modules[module], name, made)
        return made
    if f"{module}.{name}" in _MODULES:
        return importlib.import_module(f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


_MODULES = {".".join(words[:n]) for words in (name.split(".") for name in OLD_HOMES) for n in range(2, len(words) + 1)}
"""The old modules, and the packages that they are in."""


MOVED: dict[str, str] = _TABLES["moved"]
"""Modules and packages under their old paths, and where they are. An import of an old path gives the same module."""


def moved_to(name: str) -> str | None:
    """Returns the present path of a module that is imported by an old one; None if the path is not old."""
    words = name.split(".")
    for count in range(len(words), 2, -1):
        home = MOVED.get(".".join(words[:count]))
        if home is not None:
            return ".".join([home, *words[count:]])
    return None


class MovedModules(MetaPathFinder, Loader):
    """Serves the old paths of `MOVED`. Searched first: the import system would otherwise find the file of a module in
    a moved package a second time."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns the spec of a module by its old path; None for any other."""
        home = moved_to(fullname) if fullname.startswith("megatron.") else None
        if home is None or importlib.util.find_spec(home) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module at the present path in place of the new one."""
        home = moved_to(module.__name__)
        assert home is not None
        sys.modules[module.__name__] = importlib.import_module(home)


class OldHomes(MetaPathFinder, Loader):
    """Makes the modules of `OLD_HOMES` when they are imported. Searched last, so that a real module of the same name
    wins."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns the spec of an old module; None for any other."""
        if fullname not in _MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=any(name.startswith(f"{fullname}.") for name in _MODULES))

    def exec_module(self, module: ModuleType) -> None:
        """Gives a new module its names, which are looked up when they are used."""
        home = OLD_HOMES.get(module.__name__, {})
        module.__doc__ = "A home of Megatron-LM's names for old scripts; see megatron.homes."
        module.__getattr__ = lambda name: look_up(module.__name__, name)  # type: ignore[method-assign]
        if not isinstance(home, str):
            module.__dict__["__all__"] = list(home)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Yields a distribution `megatron-core`, for programs that ask for its version before they use these names.
        Only a search by this name finds it."""
        if context.name is not None and context.name.replace("_", "-").lower() == "megatron-core":
            yield _NamesOfMegatronCore()


class _NamesOfMegatronCore(Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        release = importlib.import_module("megatron.core.utils.versions").MEGATRON_LM_RELEASE
        return (
            f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {release}\nSummary: names of megatron-pretraining\n"
        )

    def locate_file(self, path: str | PathLike[str]) -> NoReturn:
        raise FileNotFoundError(f"megatron-core is not installed; megatron-pretraining has its names: {path}")


def install_old_homes() -> None:
    """Makes the old modules importable. Called once, when `megatron` is imported."""
    if not any(isinstance(finder, OldHomes) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
        sys.meta_path.append(OldHomes())
