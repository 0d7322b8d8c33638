"""Megatron-LM's functions for checkpoints, for user scripts: they act on the run that was set up last."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.folders import TRACKER, folder_name, read_tracker_file
from megatron.core.exceptions import UserError
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.facades.arguments import Arguments
from megatron.facades.global_vars import current_run, shared_record
from megatron.facades.script_providers import refuse
from megatron.facades.utils import print_rank_0
from megatron.training.checkpoint_args import take_model_flags
from megatron.training.checkpoints import Checkpoints, print_on_first_rank
from megatron.training.config.command_line import CommandLine
from megatron.training.config.flag_table import spelling_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.recorded_flags import read_recorded, recorded_words
from megatron.training.providers import Context
from megatron.training.rewind_record import RewindRecord
from megatron.training.state import SavedParts


def save_checkpoint(
    iteration: int,
    model: nn.Module | Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    num_floating_point_operations_so_far: float,
    checkpointing_context: object = None,
    pipeline_rank: int | None = None,
    expert_rank: int | None = None,
    tensor_rank: int | None = None,
    pipeline_parallel: bool | None = None,
    expert_parallel: bool | None = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: object = None,
    preprocess_common_state_dict_fn: object = None,
    release: bool = False,
    tp_group: ProcessGroup | None = None,
    pp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
) -> None:
    """Saves the run under --save as iteration `iteration`. Arguments that name ranks or groups have no effect: those of
    the run are used. The only saved state of the data is the number of consumed samples. Raises UserError like
    `Checkpoints.save`, and for arguments that are not supported yet."""
    asked = {"non_persistent_ckpt": non_persistent_ckpt, "release": release}
    asked["preprocess_common_state_dict_fn"] = preprocess_common_state_dict_fn is not None
    refuse("save_checkpoint", asked)
    run = current_run()
    if run.config.checkpoint.save is None:
        raise UserError("save_checkpoint() writes under --save, which is not given")
    flops = float(num_floating_point_operations_so_far)
    state = dataclasses.replace(run.state, iteration=iteration, floating_point_operations_so_far=flops)
    checkpoints_of_run(run).save(SavedParts(state, _as_list(model), optimizer, opt_param_scheduler))


def load_checkpoint(
    ddp_model: nn.Module | Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: OptimizerParamScheduler | None,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: object = None,
    skip_load_to_model_and_opt: bool = False,
    tp_group: ProcessGroup | None = None,
    pp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
) -> tuple[int, float]:
    """Loads from the folder that the flag `load_arg` names. Returns (iteration, floating point operations so far), or
    (0, 0.0) if the folder holds no checkpoint. Without `strict`, missing and unused keys are allowed and printed.
    Without an optimizer or a scheduler, its state is not loaded. Raises UserError like `Checkpoints.load`."""
    refuse("load_checkpoint", {"skip_load_to_model_and_opt": skip_load_to_model_and_opt})
    run = current_run()
    flags = run.config.checkpoint
    flags = dataclasses.replace(flags, load=getattr(flags, load_arg), pretrained_checkpoint=None)
    if optimizer is None:
        flags = dataclasses.replace(flags, no_load_optim=True)
    if not strict:
        flags = dataclasses.replace(flags, dist_ckpt_strictness="log_all")
    checkpoints = checkpoints_of_run(run, dataclasses.replace(run.config, checkpoint=flags))
    nothing = _NothingToLoad()
    of_optimizer = cast(MegatronOptimizer, nothing) if optimizer is None else optimizer
    of_scheduler = cast(OptimizerParamScheduler, nothing) if opt_param_scheduler is None else opt_param_scheduler
    if not checkpoints.load(SavedParts(run.state, _as_list(ddp_model), of_optimizer, of_scheduler)):
        return 0, 0.0
    return run.state.iteration, run.state.floating_point_operations_so_far


class _NothingToLoad:
    """Stands for the optimizer or the scheduler of a script that has none and only loads a model."""

    average = None

    def state_chunks(self) -> Iterator[Chunk]:
        """Yields nothing: no tensor is loaded."""
        return iter(())

    def after_load(self) -> None:
        """Does nothing."""

    def load_common_state(self, state: Mapping[str, object]) -> None:
        """Does nothing."""

    def load_state_dict(self, *state: object, **keywords: object) -> None:
        """Does nothing."""


def load_args_from_checkpoint(
    args: Arguments, load_arg: str = "load", checkpointing_context: Any = None
) -> tuple[Arguments, Arguments | None]:
    """Sets the model's arguments to those of the checkpoint in the folder that the flag `load_arg` names, and prints
    which. Call it between `parse_args` and `validate_args`. It takes the same arguments as --use-checkpoint-args.
    --ckpt-step chooses among the checkpoints of --load.

    Returns (args, the checkpoint's arguments); without a folder or a checkpoint in it (args, None), and leaves args as
    they are. Raises UserError for a damaged checkpoint, and for arguments that were used already.
    """
    if args.config is not None:
        raise UserError("load_args_from_checkpoint(args) comes before validate_args(args) and initialize_megatron()")
    folder = getattr(args, load_arg)
    step = args.ckpt_step if load_arg == "load" else None
    checkpoint = None if folder is None else find_checkpoint(Path(folder), step, log=lambda sentence: None)
    if checkpoint is None:
        print_rank_0(f"load_args_from_checkpoint: no checkpoint in {folder}: the arguments are left as they are")
        return args, None
    words, by = recorded_words(checkpoint.manifest.config), "load_args_from_checkpoint"
    before = {name: getattr(args, name) for name in args._line.values}
    of_script = {name: spelling_of(name) for name, value in before.items() if value != args._line.values[name]}
    line = CommandLine(dict(before), {**args._line.given, **of_script})
    take_model_flags(line, words, str(checkpoint.folder), by)
    if line.problems:
        raise UserError("\n".join(line.problems))
    for name, value in line.values.items():
        if value != before[name]:
            setattr(args, name, value)
    for note in line.warnings:
        print_rank_0(note)
    return args, Arguments(read_recorded(words, lambda flag: flag.from_checkpoint))


def checkpoint_exists(checkpoints_path: str | Path | None) -> bool:
    """Returns whether the folder has a checkpoint; False without a folder."""
    return checkpoints_path is not None and Path(get_checkpoint_tracker_filename(checkpoints_path)).is_file()


def get_checkpoint_tracker_filename(checkpoints_path: str | Path) -> str:
    """Returns the path of the file that names the newest checkpoint."""
    return str(Path(checkpoints_path) / TRACKER)


def get_checkpoint_name(checkpoints_path: str | Path, iteration: int, release: bool = False, **place: object) -> str:
    """Returns the folder of a checkpoint. The files in it are those of all ranks, so a rank's `place` has no effect."""
    return str(Path(checkpoints_path) / folder_name("release" if release else iteration))


def read_metadata(tracker_filename: str | Path) -> tuple[int, bool]:
    """Reads the file that names the newest checkpoint. Returns (iteration, False), or (0, True) for a release
    checkpoint. Raises UserError if there is no such file."""
    tracker = read_tracker_file(Path(tracker_filename))
    if tracker.step is None:
        raise UserError(tracker.problem or f"{tracker_filename}: No such file")
    return (tracker.step, False) if isinstance(tracker.step, int) else (0, True)


def _as_list(model: nn.Module | Sequence[nn.Module]) -> Sequence[Any]:
    return [model] if isinstance(model, nn.Module) else model


def checkpoints_of_run(run: Context, config: PretrainConfig | None = None) -> Checkpoints:
    """Returns the checkpoints of the current run, with the flags of `config` if it is given. A script may load through
    one of these objects and save through others: they share the record of which checkpoints belong to this run."""
    config, groups = config or run.config, run.environment.groups
    record = shared_record(RewindRecord(config.checkpoint, partial(print_on_first_rank, groups)))
    return Checkpoints(config, groups, record)
