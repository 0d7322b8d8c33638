"""Where checkpoints and logs go, and what a run loads: NeMoLogger, ModelCheckpoint, AutoResume, RestoreConfig."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.facades.nemo.lightning.arguments import Argument, ArgumentValues, Foreign, shown
from megatron.facades.nemo.lightning.flags import Flags

_ITERATION = re.compile(r"iter_(\d+)")

_AT_END = "a checkpoint is saved at the end of training, with the optimizer's state"


class ModelCheckpoint(ArgumentValues):
    """When checkpoints are saved, and where (`dirpath`): `give_saving` adds the settings. The run saves one at its end
    too."""

    table: Sequence[Argument] = (
        Argument("monitor", "val_loss"),
        Argument("verbose", True, note="a line says when a checkpoint is saved"),
        Argument("save_last", True, note="the newest checkpoint is always kept"),
        Argument("save_top_k", 3),
        Argument("save_weights_only", False),
        Argument("mode", "min"),
        Argument("every_n_epochs"),
        Argument("every_n_train_steps"),
        Argument("train_time_interval", refusal="give every_n_train_steps; all ranks save after the same step"),
        Argument("save_on_train_epoch_end", False, note=_AT_END),
        Argument("save_optim_on_train_end", False, note=_AT_END),
        Argument("always_save_context", True, note="a checkpoint always has the settings of its run"),
        Argument("save_context_on_train_end", True, note="a checkpoint always has the settings of its run"),
        Argument("dirpath"),
        Argument("filename", note="a checkpoint is the folder iter_NNNNNNN"),
        Argument("enable_version_counter", True, note="a checkpoint is the folder iter_NNNNNNN"),
        Argument("auto_insert_metric_name", True, note="a checkpoint is the folder iter_NNNNNNN"),
    )


def is_checkpoint_callback(callback: object) -> bool:
    """Whether a callback says when checkpoints are saved: this package's, or Lightning's."""
    return any(cls.__name__ == "ModelCheckpoint" for cls in type(callback).__mro__)


def give_saving(flags: Flags, checkpoint: Foreign, folder: str | None, in_background: bool) -> None:
    """Adds the settings of a ModelCheckpoint, this package's or Lightning's. `folder` is used without its `dirpath`."""
    own = isinstance(checkpoint, ModelCheckpoint)
    if own:
        checkpoint.give_flags(flags)
    every = checkpoint.every_n_train_steps if own else getattr(checkpoint, "_every_n_train_steps", None)
    path = checkpoint.dirpath or (folder if own or every else None)
    if path is None:
        flags.note("no checkpoint is saved: ModelCheckpoint has neither dirpath nor every_n_train_steps")
        return
    flags.give("save", str(path))
    flags.give("async_save", in_background)
    if every:
        flags.give("save_interval", int(every))
    if checkpoint.save_weights_only:
        flags.give("no_save_optim", True)
    kept = checkpoint.save_top_k
    if kept > 0 and str(checkpoint.monitor) in ("step", "global_step", "None"):
        flags.give("keep_last", kept)
    elif kept > 0:
        flags.note(f"ModelCheckpoint(save_top_k={kept}): all checkpoints are kept; with monitor='step' the newest are")


@dataclass
class RestoreConfig:
    """The checkpoint whose weights a new run starts from."""

    path: str
    load_model_state: bool = True
    load_optim_state: bool = False
    load_artifacts: bool = True

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings. With `load_optim_state` the run continues the one that wrote the checkpoint."""
        if not self.load_model_state:
            flags.refuse("RestoreConfig(load_model_state=False)", "leave restore_config out")
        elif self.load_optim_state:
            give_loading(flags, self.path)
        else:
            give_loading(flags, self.path, "pretrained_checkpoint")


@dataclass
class AutoResume:
    """Whether a run continues from the checkpoints that it finds."""

    restore_config: RestoreConfig | None = None
    resume_from_directory: str | None = None
    resume_from_path: str | None = None
    resume_if_exists: bool = False
    resume_past_end: bool = False
    resume_ignore_no_checkpoint: bool = False

    def setup(self, trainer: Foreign, model: object = None) -> None:
        """Makes the trainer use this object."""
        trainer.nemo_resume = self

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings; the folder of ModelCheckpoint must be known."""
        if self.restore_config is not None:
            self.restore_config.give_flags(flags)
        folder = self.resume_from_directory or flags.values.get("save")
        if self.resume_from_path is not None:
            give_loading(flags, self.resume_from_path)
        elif self.resume_if_exists and folder is None:
            flags.refuse("AutoResume(resume_if_exists=True)", "give resume_from_directory, or a ModelCheckpoint")
        elif self.resume_if_exists:
            flags.give("load", str(folder))
            flags.give("exit_on_missing_checkpoint", not self.resume_ignore_no_checkpoint)
        if self.resume_past_end:
            flags.note("AutoResume(resume_past_end=True) has no effect: a run whose last iteration is done trains none")


def give_loading(flags: Flags, path: object, field_name: str = "load") -> None:
    """Adds the settings that load a checkpoint: a folder of checkpoints, or the folder iter_NNNNNNN of one."""
    folder = Path(str(path))
    found = _ITERATION.fullmatch(folder.name)
    flags.give(field_name, str(folder.parent if found else folder))
    if found:
        flags.give("ckpt_step", int(found[1]))
    if field_name == "load":
        flags.give("exit_on_missing_checkpoint", True)


def give_ckpt_path(flags: Flags, path: str) -> None:
    """Adds the settings for the `ckpt_path` of fit, validate and test. "last": the folder that the run saves to."""
    folder = flags.values.get("save") if path == "last" else path
    if path in ("best", "hpc", "registry") or folder is None:
        flags.refuse(f'ckpt_path="{path}"', "give the folder of a checkpoint, or of several; the newest is loaded")
    else:
        give_loading(flags, folder)


@dataclass
class NeMoLogger:
    """The folder of a run: checkpoints, and logs of its loggers."""

    name: str = "default"
    log_dir: str | None = None
    explicit_log_dir: str | None = None
    version: str | None = None
    use_datetime_version: bool = True
    log_local_rank_0_only: bool = False
    log_global_rank_0_only: bool = False
    files_to_copy: list[str] | None = None
    update_logger_directory: bool = True
    ckpt: Foreign = None
    tensorboard: Foreign = None
    wandb: Foreign = None
    extra_loggers: list[Foreign] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The folder. A version is part of it if it is given; the time is not, so that a run finds its checkpoints."""
        if self.explicit_log_dir is not None:
            return Path(self.explicit_log_dir)
        return Path(self.log_dir or "nemo_experiments") / self.name / (self.version or "")

    def setup(self, trainer: Foreign, resume_if_exists: bool = False, task_config: object = None) -> "NeMoLogger":
        """Makes the trainer use this object."""
        trainer.nemo_log = self
        return self

    def give_flags(self, flags: Flags, in_background: bool) -> None:
        """Adds the settings of checkpoints and logs."""
        if self.files_to_copy:
            flags.refuse("NeMoLogger(files_to_copy=...)", "copy the files before the run")
        if self.ckpt is not None:
            give_saving(flags, self.ckpt, str(self.folder / "checkpoints"), in_background)
        for logger in (self.tensorboard, self.wandb, *self.extra_loggers):
            if logger is not None:
                give_logger(flags, logger, str(self.folder))


def give_logger(flags: Flags, logger: Foreign, folder: str) -> None:
    """Adds the settings of one of Lightning's loggers: the run writes to the same place itself."""
    kind = type(logger).__name__
    if kind == "TensorBoardLogger":
        flags.give("tensorboard_dir", str(getattr(logger, "save_dir", None) or folder))
    elif kind == "WandbLogger":
        init = getattr(logger, "_wandb_init", {})
        for setting, name in (("wandb_project", "project"), ("wandb_exp_name", "name"), ("wandb_entity", "entity")):
            flags.give(setting, init.get(name) or getattr(logger, f"_{name}", None) or getattr(logger, name, None))
    else:
        advice = "the run logs to TensorBoard, Weights & Biases and others through flags; leave it out"
        flags.refuse(f"logger={shown(logger)}", advice)
