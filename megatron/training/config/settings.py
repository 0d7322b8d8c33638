"""The values of a run while they are completed and checked, and the source of each value."""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch

from megatron.core.exceptions import UserError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.batch_schedule import BatchSteps
from megatron.training.config.command_line import CommandLine

Source = Literal["default", "flag", "derived", "script", "recipe"]
"""Where a value comes from: the field's default, a flag, another value, the user's script, or --recipe."""
CHOSEN: tuple[Source, ...] = ("flag", "script", "recipe")
"""Sources of values that the user chose."""

_Config = TypeVar("_Config")

_MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class LaunchEnvironment:
    """The environment in which a run is started."""

    world_size: int
    """Number of ranks."""
    has_cuda: bool
    """Whether this machine has a CUDA device."""
    world_size_is_given: bool = True
    """Whether the environment variable WORLD_SIZE is set, as under torchrun."""
    ranks_of_host: int | None = None
    """Number of ranks on each host; None if it is not known."""
    gpus_of_host: int | None = None
    """Number of GPUs that this process sees; None if it sees none, or only its own."""
    looks_at_files: bool = False
    """Whether this process checks that files exist. The first rank does it for all."""

    @classmethod
    def of_this_process(cls) -> "LaunchEnvironment":
        """Reads WORLD_SIZE and RANK, which torchrun sets, and looks for devices. Raises UserError if WORLD_SIZE is not
        a number from 1 to a million."""
        words = os.environ.get("WORLD_SIZE", "1")
        if not words.isdecimal() or not 1 <= int(words) <= _MOST_RANKS:
            raise UserError(f"WORLD_SIZE {words}: expected the number of ranks, such as 8, at most {_MOST_RANKS}")
        return cls(
            int(words),
            torch.cuda.is_available(),
            world_size_is_given="WORLD_SIZE" in os.environ,
            ranks_of_host=ranks_of_host(os.environ),
            gpus_of_host=gpus if (gpus := torch.cuda.device_count()) > 1 else None,
            looks_at_files=os.environ.get("RANK", "0") == "0",
        )


def gpus_of_node(given: int | None, launch: LaunchEnvironment) -> int | None:
    """Returns the number of ranks of a node: that of --gpus-per-node (`given`), that of the launcher, or the GPUs of
    this host in a run of several ranks; None if it is not known."""
    if given is not None:
        return given
    return launch.ranks_of_host or (launch.gpus_of_host if launch.world_size > 1 else None)


class Settings:
    """All values by field name, as attributes. `provenance` holds the source of each value."""

    def __init__(self, line: CommandLine, launch_environment: LaunchEnvironment) -> None:
        self.values: dict[str, Any] = dict(line.values)
        self.values.setdefault("model_family", None)
        self.values.setdefault("datasets_of_script", None)
        self.values.setdefault("loop_of_script", None)  # no part of the config
        self.values.setdefault("num_encoder_layers", None)
        self.launch_environment = launch_environment
        self.fixed_world_size = launch_environment.world_size if launch_environment.world_size_is_given else None
        """Number of ranks that the launcher has started; None if the user can still choose it."""
        self.provenance: dict[str, Source] = dict.fromkeys(self.values, "default")
        self.provenance.update(dict.fromkeys(line.script, "script"))
        self.provenance.update(dict.fromkeys(line.given, "flag"))
        self.provenance.update(dict.fromkeys(line.from_recipe, "recipe"))
        self.set_derived("world_size", launch_environment.world_size)

    def __getattr__(self, field: str) -> Any:
        try:
            return self.__dict__["values"][field]
        except KeyError:
            raise AttributeError(field) from None

    @property
    def transformer(self) -> TransformerConfig:
        """These values, for rules that read a TransformerConfig: its fields are among them. Values may be missing."""
        return cast(TransformerConfig, self)

    def set_derived(self, field: str, value: object) -> None:
        """Sets a value that follows from other values, and records this as its source."""
        self.values[field] = value
        self.provenance[field] = "derived"

    def is_given(self, field: str) -> bool:
        """Whether a flag, a recipe or the user's script has set the value."""
        return self.provenance.get(field) in CHOSEN

    def build(self, config_class: type[_Config], **fixed: object) -> _Config:
        """Returns an object of a config dataclass whose fields have the values of the same names. `fixed` gives or
        replaces single fields."""
        assert dataclasses.is_dataclass(config_class)
        names = (field.name for field in dataclasses.fields(config_class))
        return config_class(**{name: self.values[name] for name in names if name in self.values} | fixed)


def batch_steps(s: Settings) -> BatchSteps | None:
    """Returns the value of --step-batch-size-schedule; None without the flag or if the value is impossible."""
    if s.step_batch_size_schedule is None or not s.seq_length or s.seq_length < 1:
        return None
    try:
        return BatchSteps.parse(s.step_batch_size_schedule, s.seq_length)
    except UserError:  # the checks report it
        return None


def ranks_of_host(environ: Mapping[str, str]) -> int | None:
    """Returns the number of ranks on this host, from the variables of torchrun, Open MPI, another MPI or SLURM; None if
    they do not say. The job script of SLURM, which is one process, gets the number of tasks of its node."""
    found = [environ.get(name) for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")]
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    if "WORLD_SIZE" in environ and environ["WORLD_SIZE"] == environ.get("SLURM_NTASKS"):
        found.append(tasks_of_node(tasks, environ.get("SLURM_NODEID", "0")))
    return next((int(count) for count in found if count is not None and count.isdecimal() and int(count) > 0), None)


def tasks_of_node(text: str, node: str) -> str | None:
    """Returns the number of tasks of a node from SLURM's list of all nodes, such as 8(x3),4; None if it does not
    say."""
    counts: list[str] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [tasks] * int(times or 1)
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None
