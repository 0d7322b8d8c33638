"""Megatron-LM's global functions for user scripts: `get_args()`, `get_timers()`, `get_tokenizer()`.

The module keeps the run that was set up last, as megatron.core.parallel_state keeps the process groups. Our own code
takes its settings as arguments and does not call these functions.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.core.config_fields import value_text
from megatron.core.exceptions import UserError
from megatron.core.timers import Timers
from megatron.training.config.flag_table import spelling_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolution import field_of_name

if TYPE_CHECKING:
    from megatron.training.providers import Context
    from megatron.training.tokenizer.base import Tokenizer

_STATE_NAMES = {
    "curr_iteration": "iteration",
    "num_floating_point_operations_so_far": "floating_point_operations_so_far",
}
"""Megatron-LM's names of fields of TrainState."""


class LiveArguments:
    """The run's settings and state under Megatron-LM's names, with their present values.

    Reading looks, in this order, at what the script wrote, the script's own arguments, the state of training
    (`iteration`, `consumed_train_samples`, ...), and the settings, by field (`num_moe_experts`) or by flag
    (`num_experts`). A new attribute can be written; a setting or the state cannot, and the error says how to change it
    instead.
    """

    __slots__ = ("_own", "_settings", "_state")

    def __init__(self, config: PretrainConfig, state: Any = None, **facts: Any) -> None:
        set_ = object.__setattr__
        set_(self, "_own", dict(config.extra))
        set_(self, "_settings", {**config.flat(), "rank": int(os.environ.get("RANK", 0)), **facts})
        set_(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        state_name = _STATE_NAMES.get(name, name)
        if self._state is not None and hasattr(self._state, state_name):
            return getattr(self._state, state_name)
        field = name if name in self._settings else field_of_name(name)
        if field is None:
            raise AttributeError(f"args has no {name!r}; a script's own arguments come from extra_args_provider")
        return self._settings[field]

    def __setattr__(self, name: str, value: Any) -> None:
        if self._state is not None and hasattr(self._state, _STATE_NAMES.get(name, name)):
            raise UserError(f"args.{name} is the state of training, which only the training loop changes")
        field = name if name in self._settings else field_of_name(name)
        if field is not None and self._settings[field] != value:
            self._refuse(name, field, value)
        if field is None:
            self._own[name] = value

    def _refuse(self, name: str, field: str, value: Any) -> NoReturn:
        flag = spelling_of(field)
        way = f"pass {flag}" if flag.startswith("--") else "change the flags that it follows from"
        stands = value_text(self._settings[field])
        raise UserError(
            f"args.{name} = {value_text(value)}: it is {stands} and was used already; {way}, or hand args_defaults to "
            "pretrain()"
        )

    def __delattr__(self, name: str) -> None:
        if name not in self._own:
            raise UserError(f"args.{name} cannot be deleted")
        del self._own[name]

    def __dir__(self) -> list[str]:
        return sorted(self.as_dict())

    def as_dict(self) -> Mapping[str, Any]:
        """Returns a copy of everything that can be read, by name. `vars(args)` gives the same."""
        state = vars(self._state) if self._state is not None else {}
        return {**self._settings, **state, **self._own}

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return dict(self.as_dict())

    def __repr__(self) -> str:
        return f"LiveArguments({len(self.as_dict())} values)"


class _CurrentRun:
    """The run that was set up last, if any."""

    context: "Context | None" = None
    arguments: LiveArguments | None = None
    timers: Timers | None = None
    tensorboard_writer: Any = None


_current = _CurrentRun()


def set_current_run(context: "Context", timers: Timers | None = None, **facts: Any) -> None:
    """Makes this run the one that the functions below act on. `facts` are further values of `get_args()`."""
    _current.context = context
    _current.arguments = LiveArguments(context.config, context.state, **facts)
    _current.timers = timers


def clear_current_run() -> None:
    """Forgets the current run."""
    _current.context = _current.arguments = _current.timers = _current.tensorboard_writer = None


def current_run() -> "Context":
    """Returns the run that was set up last, for Megatron-LM's functions that take no config. Raises UserError if there
    is none."""
    if _current.context is None:
        raise UserError("there is no run yet: this works inside the functions that are handed to pretrain()")
    return _current.context


def get_args() -> LiveArguments:
    """Returns settings and state of the run. Raises UserError before a run is set up."""
    if _current.arguments is None:
        raise UserError("get_args() works once the run is set up: inside the functions that are handed to pretrain()")
    return _current.arguments


def get_tokenizer() -> "Tokenizer":
    """Returns the run's tokenizer. Raises UserError before a run is set up."""
    if _current.context is None:
        raise UserError("get_tokenizer() works once the run is set up")
    return _current.context.tokenizer


def get_timers() -> Timers:
    """Returns the run's timers, or silent ones if it has none."""
    if _current.timers is None:
        _current.timers = Timers(log_level=0, log_option="max")
    return _current.timers


def get_tensorboard_writer() -> Any:
    """Returns None: the app's log writes TensorBoard's files."""
    return _current.tensorboard_writer


def get_wandb_writer() -> None:
    """Returns None: Weights & Biases is not supported yet."""
    return
