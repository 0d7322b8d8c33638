"""All values of a run by field name while they are being completed, and where each comes from."""

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.core.exceptions import UserError
from megatron.training.config.command_line import CommandLine

Source = Literal["default", "flag", "derived", "script"]


@dataclass(frozen=True)
class LaunchEnvironment:
    """What a run is started in."""

    world_size: int
    has_cuda: bool
    world_size_is_given: bool = True
    """Whether somebody, as torchrun does, has said how many ranks there are."""
    looks_at_files: bool = False
    """Whether this process checks that files are there: the first one does, for all."""

    @classmethod
    def of_this_process(cls) -> "LaunchEnvironment":
        """From WORLD_SIZE and RANK, which torchrun sets, and the devices of this machine. UserError if the former is no
        number."""
        words = os.environ.get("WORLD_SIZE", "1")
        if not words.isdecimal() or int(words) < 1:
            raise UserError(f"WORLD_SIZE {words}: expected the number of ranks, such as 8")
        return cls(
            int(words),
            torch.cuda.is_available(),
            world_size_is_given="WORLD_SIZE" in os.environ,
            looks_at_files=os.environ.get("RANK", "0") == "0",
        )


class Settings:
    """Attribute access to every value; `derive` changes one and remembers that it was derived."""

    def __init__(self, line: CommandLine, launch_environment: LaunchEnvironment) -> None:
        self.values: dict[str, Any] = dict(line.values)
        self.launch_environment = launch_environment
        self.provenance: dict[str, Source] = dict.fromkeys(self.values, "default")
        self.provenance.update(dict.fromkeys(line.script, "script"))
        self.provenance.update(dict.fromkeys(line.given, "flag"))
        self.derive("world_size", launch_environment.world_size)

    def __getattr__(self, field: str) -> Any:
        try:
            return self.__dict__["values"][field]
        except KeyError:
            raise AttributeError(field) from None

    def derive(self, field: str, value: Any) -> None:
        """Set a value that follows from others."""
        self.values[field] = value
        self.provenance[field] = "derived"

    def is_given(self, field: str) -> bool:
        """A flag, or the user's script, has set it."""
        return self.provenance.get(field) in ("flag", "script")
