"""The settings of a run that NeMo's objects give, collected as flags, and what is wrong with them."""

import dataclasses
import os
from collections.abc import Collection, Sequence

import torch.distributed as dist

from megatron.training.arguments import configure
from megatron.training.config.flag_table import flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment


class Flags:
    """Values by field, further words of a command line, notes and problems."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.accepted: list[str] = []
        """Flags of Megatron-LM that have no effect here; the run says why."""
        self.notes: list[str] = []
        self.problems: list[str] = []

    def give(self, field: str, value: object) -> None:
        """Sets a field; a later value replaces an earlier one."""
        self.values[field] = value

    def refuse(self, what: str, advice: str) -> None:
        """Adds a problem. `advice` says what works."""
        self.problems.append(f"{what}: {advice}")

    def note(self, line: str) -> None:
        """Adds a line that is printed once, before the run."""
        self.notes.append(line)

    def give_fields(self, config: object, of: type, skip: Collection[str] = ()) -> None:
        """Sets those fields of a config dataclass of the library that differ from the defaults of `of`. One without a
        flag is refused. Fields in `skip` are left out."""
        table, name_of_class = flag_table(), type(config).__name__
        for field in dataclasses.fields(of):
            value = getattr(config, field.name)
            default = field.default_factory() if callable(field.default_factory) else field.default
            if field.name in skip or value is None or value == default or field.name.startswith("_"):
                continue
            if field.name in table:
                self.give(field.name, value)
            else:
                self.refuse(f"{name_of_class}({field.name}=...)", "no flag sets it here; leave it out")

    def words(self) -> list[str]:
        """Returns the settings as words of a command line."""
        return [*(word for field, value in self.values.items() for word in words_of(field, value)), *self.accepted]

    def configure(self, further: Sequence[str] = ()) -> PretrainConfig:
        """Returns the checked settings of a run, `further` flags included, which win. Prints the notes on the first
        rank. Raises one ConfigurationError with all problems, those of the flags too."""
        try:
            defaults = {"model_family": "gpt", **({} if self.has_data else {"datasets_of_script": True})}
            launch = dataclasses.replace(LaunchEnvironment.of_this_process(), world_size=self.world_size)
            config = configure([*self.words(), *further], args_defaults=defaults, launch_environment=launch)
        except ConfigurationError as error:
            raise ConfigurationError([*self.problems, *error.problems]) from None
        if self.problems:
            raise ConfigurationError(self.problems)
        if os.environ.get("RANK", "0") == "0":
            print("".join(f"{note}\n" for note in dict.fromkeys(self.notes)), end="", flush=True)
        return config

    @property
    def world_size(self) -> int:
        """Number of ranks that the launcher has started."""
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))

    @property
    def has_data(self) -> bool:
        """Whether a setting says where the data are."""
        return any(name in self.values for name in ("mock_data", "data_path", "train_data_path", "valid_data_path"))


def words_of(field: str, value: object) -> list[str]:
    """Returns the words of a command line that set a field; none if the value is the flag's default, or if no words
    can set it."""
    flag = flag_table()[field]
    if value is None or value == flag.default:
        return []
    if flag.switch is not None:
        return [spelling for spelling, sets in flag.switch.items() if sets is bool(value)][:1]
    several = flag.nargs is not None and isinstance(value, list | tuple)
    values = list(value) if several else [value]  # type: ignore[call-overload]
    return [flag.spelling, *map(flag.word_of, values)]
