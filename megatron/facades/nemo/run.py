"""A thin slice of NeMo-Run: `run.Config`, `run.Partial` and `run.run` in this process.

What starts other processes (executors, experiments) is not here: start the script with torchrun or srun.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Generic, TypeVar

from megatron.core.exceptions import UserError
from megatron.facades.nemo.lightning.arguments import Foreign, nearest

Made = TypeVar("Made")


class Config(Generic[Made]):
    """A call that is not made yet: a class or function and its arguments, which are attributes that a script may
    change. An argument that is not given reads as its default. Values may be further Configs."""

    def __init__(self, fn_or_cls: Callable[..., Made], /, *positional: object, **arguments: object) -> None:
        bound = _signature(fn_or_cls).bind_partial(*positional).arguments if positional else {}
        object.__setattr__(self, "_callable", fn_or_cls)
        object.__setattr__(self, "_arguments", {**bound, **arguments})

    def __getattr__(self, name: str) -> Foreign:
        arguments = object.__getattribute__(self, "_arguments")
        if name in arguments:
            return arguments[name]
        known = None if name.startswith("__") else _signature(self._callable).parameters.get(name)
        if known is not None and known.default is not inspect.Parameter.empty:
            return known.default
        raise AttributeError(f"the arguments of {self._callable.__name__} given so far are {', '.join(arguments)}")

    def __setattr__(self, name: str, value: object) -> None:
        known = _signature(self._callable).parameters
        if name not in known and all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in known.values()):
            raise AttributeError(
                f"{self._callable.__name__} has no argument {name}; {nearest(name, known)}".rstrip("; ")
            )
        object.__getattribute__(self, "_arguments")[name] = value

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._arguments.items())
        return f"<{type(self).__name__}[{self._callable.__name__}({arguments})]>"

    def arguments(self) -> dict[str, object]:
        """Returns the arguments, with objects in place of Configs."""
        return {name: build(value) for name, value in self._arguments.items()}

    def make(self) -> Foreign:
        """Makes the call; a Partial becomes a functools.partial."""
        return self._callable(**self.arguments())


class Partial(Config[Made]):
    """A function with some of its arguments. `run.run` calls it."""

    def make(self) -> Foreign:
        """Returns the function with its arguments, to be called."""
        return functools.partial(self._callable, **self.arguments())

    def __call__(self, *arguments: object, **more: object) -> Made:
        """Calls the function."""
        result: Made = self.make()(*arguments, **more)
        return result


def _signature(function: Foreign) -> inspect.Signature:
    """Returns the signature of a call: that of a class is its constructor's, even if it has a `__new__`."""
    if isinstance(function, type) and "__signature__" not in vars(function):
        function = functools.partial(function.__init__, None)  # type: ignore[misc]
    return inspect.signature(function)


def build(value: Foreign) -> Foreign:
    """Returns a value with objects in place of the Configs in it, in lists and dictionaries too."""
    if isinstance(value, Config):
        return value.make()
    if isinstance(value, list | tuple):
        return type(value)(build(item) for item in value)
    if isinstance(value, dict):
        return {name: build(item) for name, item in value.items()}
    return value


def run(fn_or_script: Foreign, executor: object = None, direct: bool = True, **how: object) -> Foreign:
    """Calls a Partial, or another function without arguments, in this process, and returns its result. Raises UserError
    with an executor: torchrun starts the ranks."""
    if executor is not None:
        raise UserError(
            f"run.run(executor=<{type(executor).__name__}>): leave it out and start the script with torchrun "
            "--nproc_per_node N, or with srun (examples/train.slurm)"
        )
    for name in how:
        if name not in ("name", "dryrun", "detach", "tail_logs"):
            raise UserError(f"run.run({name}=...): there is no such argument here; leave it out")
    return build(fn_or_script)()


def __getattr__(name: str) -> Foreign:
    """Raises UserError for what NeMo-Run has and this slice has not."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise UserError(
        f"nemo_run.{name}: not part of megatron.facades.nemo.run, which has Config, Partial and run; start the script "
        "with torchrun or srun, or install nemo_run"
    )
