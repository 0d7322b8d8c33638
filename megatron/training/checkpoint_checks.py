"""Checks whether a run may load a checkpoint: its model, its state, and the keys that may differ."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from megatron.core.dist_checkpointing.checkpoint import Checkpoint, open_checkpoint
from megatron.core.dist_checkpointing.checkpoint_selection import select_folders
from megatron.core.dist_checkpointing.chunk import AVERAGE, SCALING_STATE, optimizer_state_name
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.folders import folder_name
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST,
    BrokenCheckpoint,
    Manifest,
    OutdatedCheckpoint,
    read_manifest,
)
from megatron.core.dist_checkpointing.planning import MismatchPolicy
from megatron.core.exceptions import UserError
from megatron.core.utils.store_path import place
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.inspection.run_description import (
    OF_EXPERTS,
    architecture_differences,
    check_architecture,
    check_trained_parts,
    setting_differences,
)
from megatron.training.lr_schedule import check_schedule
from megatron.training.rewind_record import temporary_folder

_EMBEDDING = "embedding.word_embeddings.weight"
_ALL_OPTIMIZER_STATE = optimizer_state_name("*", "*")
_AVERAGES = optimizer_state_name(AVERAGE, "*")
"""A run may begin or end to average its weights at any checkpoint."""


def check_before_build(config: PretrainConfig, schedule_of_flags: bool = True) -> None:
    """Raises UserError, the same on all ranks, if every checkpoint that --load may continue from, temporary ones too,
    has another model or schedule than this run. This check comes before the model is built, which can take minutes;
    `Checkpoints.load` comes after it. `schedule_of_flags` is False if a script builds its own schedule; it is not
    compared then. Collective."""
    flags = config.checkpoint
    if flags.load is None or flags.finetune or config.transformer.moe_use_upcycling:
        return
    if config.evaluation.skip_train:
        schedule_of_flags = False
    temporary = temporary_folder(flags, flags.load) if flags.ckpt_step is None else None
    roots = [place(flags.load), *([] if temporary is None else [temporary])]
    RankCoordinator().run_on_first(partial(_check_candidates, config, roots, schedule_of_flags))


def _check_candidates(config: PretrainConfig, roots: Sequence[Path], with_schedule: bool) -> None:
    try:
        found = [root / name for root in roots for name in select_folders(root, config.checkpoint.ckpt_step).folders]
    except UserError:
        return  # `Checkpoints.load` reports it
    problem = None
    for folder in found:
        try:
            manifest = read_manifest(folder)
            check_architecture(config, manifest.config)
            if with_schedule and "train_state" in manifest.common:
                with naming_of_damage(folder / MANIFEST, "scheduler"):
                    check_schedule(config, manifest.common["scheduler"])
            return
        except BrokenCheckpoint:  # `Checkpoints.load` leaves it out
            continue
        except UserError as error:
            problem = problem or error
    if problem is not None:
        raise problem


def command_line_in(folder: Path, manifest: Manifest) -> list[str]:
    """Returns the flags that a checkpoint's run had. Raises UserError if it names none."""
    words = manifest.config.get("command_line")
    if not isinstance(words, list):
        raise UserError(f"{folder / MANIFEST}: config.command_line is missing, so the flags of its run are not known")
    return list(words)


def ranks_of_checkpoint(checkpoint: Checkpoint) -> int:
    """Returns the number of ranks of the run that wrote a checkpoint."""
    return math.prod(int(checkpoint.manifest.layout.get(axis, 1)) for axis in ("tp", "pp", "cp", "dp"))


def check_vocabulary(config: PretrainConfig, sizes: tuple[int, int]) -> None:
    """Raises UserError, the same on all ranks, if the embedding of the newest checkpoint that the run may load has
    neither of these numbers of rows: this run's vocabulary without and with padding. Comes before the model is built.
    Leaves out what `Checkpoints.load` reports, and temporary checkpoints. Collective."""
    flags = config.checkpoint
    if flags.load is None and flags.pretrained_checkpoint is None:
        return
    if not config.transformer.moe_use_upcycling and flags.non_persistent_save_interval is None:
        RankCoordinator().run_on_first(partial(_check_rows, config, sizes))


def _check_rows(config: PretrainConfig, sizes: tuple[int, int]) -> None:
    flags = config.checkpoint
    try:
        roots = [place(root) for root in (flags.load, flags.pretrained_checkpoint) if root is not None]
        folders = [root / name for root in roots for name in select_folders(root, flags.ckpt_step).folders[:1]]
        if not folders:
            return
        checkpoint = open_checkpoint(folders[0])
    except (UserError, BrokenCheckpoint):
        return
    if _EMBEDDING not in checkpoint.catalogue:
        return
    rows = checkpoint.catalogue[_EMBEDDING][0].chunk.global_shape[0]
    if rows not in sizes:
        raise UserError(
            f"--tokenizer-type {config.tokenizer.family} gives a vocabulary of {sizes[0]} ids in this run, but "
            f"the checkpoint {checkpoint.folder} has {rows}: give the tokenizer of the run that saved it, with the "
            "same files and --vocab-size (--use-checkpoint-args takes those that are not given)"
        )


def check_manifest(
    config: PretrainConfig, manifest: Manifest, say: Callable[..., None], *, weights_only: bool, with_optimizer: bool
) -> None:
    """Raises UserError if the checkpoint has another model than this run, or lacks state that the flags ask for. With
    `weights_only`, another model only causes a warning through `say`."""
    if weights_only:
        for difference in architecture_differences(config, manifest.config):
            say(f"WARNING: {difference}")
        for difference in setting_differences(config, manifest.config, ("tokenizer_type",), with_versions=False):
            say(f"WARNING: {difference}")
    else:
        check_architecture(config, manifest.config)
    if not with_optimizer:
        return
    if manifest.common.get("optimizer") is not None:
        check_trained_parts(config, manifest.config)
        return
    folder = config.checkpoint.load
    if "train_state" not in manifest.common:
        raise UserError(
            f"--load {folder}: this is a release checkpoint, weights without optimizer state; give "
            f"--pretrained-checkpoint {folder} instead to begin a run from them (--load is then for the "
            "checkpoints of that run itself), or add --finetune"
        )
    raise UserError(
        f"the checkpoint of iteration {manifest.iteration} was saved without optimizer state "
        "(--no-save-optim): add --no-load-optim to continue with a fresh optimizer, or --finetune to start anew"
    )


@contextlib.contextmanager
def naming_of_damage(manifest: Path, part: str) -> Iterator[None]:
    """Makes an error while a part of a manifest's `common` is loaded a UserError that names the file. No schema can say
    what a script's own scheduler and optimizer keep."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{manifest}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{manifest}: common.{part} does not fit this run ({error!r:.200})") from error


def refuse_non_finite_weights(manifest: Manifest) -> None:
    """Raises OutdatedCheckpoint if the weights of a checkpoint are known not to be finite. A load then takes an older
    one."""
    if manifest.weights_finite is False:
        step = manifest.iteration
        raise OutdatedCheckpoint(
            folder_name(step), f"its weights are not all finite (--ckpt-step {step} loads it nevertheless)"
        )


def check_dense_manifest(config: PretrainConfig, root: Path, manifest: Manifest, say: Callable[..., None]) -> None:
    """Warns, through `say`, if the dense model that --moe-use-upcycling starts from differs from this run's in more
    than its experts. Raises UserError if it has experts."""
    experts = manifest.config.get("architecture", {}).get("num_moe_experts")
    if experts is not None:
        raise UserError(
            f"--moe-use-upcycling makes experts of a dense model, but that in {root} has {experts} experts a "
            "layer; leave --moe-use-upcycling out"
        )
    for difference in architecture_differences(config, manifest.config, leave_out=OF_EXPERTS):
        say(f"WARNING: {difference}")


def mismatch_policy(flags: CheckpointConfig, with_optimizer: bool) -> MismatchPolicy:
    """Returns the keys that the run or the checkpoint may lack: those that --dist-ckpt-strictness and --ckpt-waive-keys
    allow, and those of the optimizer if its state is not loaded."""
    goes_on = flags.dist_ckpt_strictness in ("ignore_all", "log_all", "log_unexpected")
    left = () if with_optimizer else (_ALL_OPTIMIZER_STATE,)
    return MismatchPolicy(goes_on, goes_on, (*(flags.ckpt_waive_keys or ()), SCALING_STATE, _AVERAGES), left)
