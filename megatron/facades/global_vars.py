"""Megatron-LM's global functions for user scripts: `get_args()`, `get_timers()`, `get_tokenizer()`.

The module keeps the run that was set up last, as megatron.facades.parallel_state keeps the process groups. Our own code
takes its settings as arguments and does not call these functions.
"""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.core.declarations.config_fields import value_text
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.stages import Pipeline, decoder_stage
from megatron.core.timers import Timers
from megatron.data.tokenizer.build import build_tokenizer as build_tokenizer_of_config
from megatron.facades import parallel_state
from megatron.facades.dist_signal_handler import DistributedSignalHandler
from megatron.facades.num_microbatches_calculator import use_schedule
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config.flag_table import spelling_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolution import field_of_name
from megatron.training.launch.environment import Publication
from megatron.training.rewind_record import RewindRecord

if TYPE_CHECKING:
    from megatron.data.tokenizer.base import Tokenizer
    from megatron.training.providers import Context, Providers

_STATE_NAMES = {
    "curr_iteration": "iteration",
    "num_floating_point_operations_so_far": "floating_point_operations_so_far",
}
"""Megatron-LM's names of fields of TrainState."""


_OLD_ARGUMENTS: dict[str, Any] = {
    "dataloader_inter_document_masking": False,
    "modelopt_enabled": False,
    "per_dataset_sequences_path": None,
    "renormalize_blend_weights": False,
    "s3_cache_path": None,
    "yaml_cfg": None,
}
"""Default values of flags that Megatron-LM's scripts read and that do not exist here, or no longer exist. The command
line refuses these flags, so no other value is possible."""


class LiveArguments:
    """The run's settings and state under Megatron-LM's names, with their present values.

    Reading looks, in this order, at what the script wrote, the script's own arguments, the state of training
    (`iteration`, `consumed_train_samples`, ...), and the settings, by field (`num_moe_experts`) or by flag
    (`num_experts`). A new attribute can be written; a setting cannot, and the error says how to change it instead. The
    state can be written after `initialize_megatron`, until `train_step` or `train` counts.
    """

    __slots__ = ("_own", "_settings", "_state")

    def __init__(self, config: PretrainConfig, state: Any = None, **facts: Any) -> None:
        set_ = object.__setattr__
        set_(self, "_own", dict(config.extra))
        set_(self, "_settings", {**config.flat(), "rank": int(os.environ.get("RANK", 0)), **facts})
        if config.transformer.num_encoder_layers and config.transformer.pipeline_model_parallel_size > 1:
            # Scripts of releases 0.9 and 0.11 ask for it, however the command line says it.
            self._settings["encoder_pipeline_model_parallel_size"] = decoder_stage(config.transformer)
        set_(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        state_name = _STATE_NAMES.get(name, name)
        if self._state is not None and hasattr(self._state, state_name):
            return getattr(self._state, state_name)
        field = name if name in self._settings else field_of_name(name)
        if field is None and name in _OLD_ARGUMENTS:
            return _OLD_ARGUMENTS[name]
        if field is None:
            raise AttributeError(f"args has no {name!r}; a script's own arguments come from extra_args_provider")
        return self._settings[field]

    def __setattr__(self, name: str, value: Any) -> None:
        if self._state is not None and hasattr(self._state, _STATE_NAMES.get(name, name)):
            return self._count(name, _STATE_NAMES.get(name, name), value)
        field = name if name in self._settings else field_of_name(name)
        if field is not None and self._settings[field] != value:
            self._refuse(name, field, value)
        if field is None:
            self._own[name] = value

    def _count(self, name: str, field: str, value: object) -> None:
        """Writes a count of the training state. Raises UserError if the app counts, unless it has this value."""
        if getattr(self._state, field) == value:
            return
        if not _current.script_counts:
            raise UserError(
                f"args.{name} is the state of training, which pretrain(), train() and train_step() count themselves; "
                "leave it out, unless the script has its own training step"
            )
        setattr(self._state, field, value)

    def _refuse(self, name: str, field: str, value: object) -> NoReturn:
        flag = spelling_of(field)
        way = f"pass {flag}" if flag.startswith("--") else "change the flags that it follows from"
        stands = value_text(self._settings[field])
        raise UserError(
            f"args.{name} = {value_text(value)}: its value {stands} was used already; {way}, or give args_defaults to "
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


class PluginArguments(LiveArguments):
    """The arguments of a run that Accelerate's plugin drives. It names the folders of checkpoints when it saves and
    loads, and writes settings that have no effect on a GPT."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("save", "load"):
            change_folder(name, str(value))
            self._settings[name] = value
        elif name == "bert_binary_head":
            self._own[name] = value
        else:
            super().__setattr__(name, value)


class _CurrentRun:
    """The run that was set up last, if any."""

    context: "Context | None" = None
    arguments: Any = None
    """A LiveArguments, or what a script gave to `set_args`."""
    tokenizer: "Tokenizer | None" = None
    timers: Timers | None = None
    tensorboard_writer: Any = None
    wandb_writer: Any = None
    signal_handler: DistributedSignalHandler | None = None
    record: RewindRecord | None = None
    script_counts: bool = False
    """Whether the script has a training step of its own, and may write iterations and samples."""
    plugin: bool = False
    """Whether Accelerate's plugin drives the run: it adds the samples of a step itself, and takes seven results."""


_current = _CurrentRun()


def set_current_run(context: "Context", **facts: object) -> None:
    """Makes this run the one that the functions below act on. `facts` are further values of `get_args()`."""
    _current.context = context
    _current.arguments = LiveArguments(context.config, context.state, **facts)
    _current.timers, _current.tokenizer = context.timers, context.tokenizer
    _current.record, _current.plugin = None, False


class PublishedRun(Publication):
    """Keeps a run where Megatron-LM's functions for scripts look for it."""

    @contextlib.contextmanager
    def stages(self, pipeline: Pipeline) -> Iterator[None]:
        """Inside the context, `parallel_state` knows these virtual stages."""
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        v_shaped = parallel_state.is_pipeline_v_shaped()
        parallel_state.set_virtual_pipeline_model_parallel_world_size(
            pipeline.chunks if pipeline.chunks > 1 else None, v_shaped=pipeline.v_shaped
        )
        try:
            yield
        finally:
            parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks, v_shaped=v_shaped)

    @contextlib.contextmanager
    def run_for_now(self, context: "Context", **facts: Any) -> Iterator[None]:
        """Inside the context, this is the run of `get_args()`. At the end the run before is, if there was one."""
        before = dict(vars(_current))
        set_current_run(context, **facts)
        try:
            yield
        finally:
            vars(_current).clear()
            vars(_current).update(before)

    def begin(self, context: "Context", **facts: Any) -> None:
        """Makes this the run of `get_args()`."""
        set_current_run(context, **facts)

    def set_schedule(self, schedule: BatchSchedule) -> None:
        """Sets the schedule of `get_num_microbatches()`."""
        use_schedule(schedule)

    def set_writers(self, tensorboard: Any, wandb: Any) -> None:
        """Sets the results of `get_tensorboard_writer()` and `get_wandb_writer()`."""
        _current.tensorboard_writer, _current.wandb_writer = tensorboard, wandb


def published(providers: "Providers") -> "Providers":
    """Returns the providers of a run that Megatron-LM's functions for scripts act on."""
    return dataclasses.replace(providers, publication=PublishedRun())


def change_folder(name: str, folder: str) -> None:
    """Makes `folder` the value of --save or --load (`name`) in the current run."""
    run = current_run()
    flags = run.config.checkpoint
    save, load = (folder, flags.load) if name == "save" else (flags.save, folder)
    checkpoint = dataclasses.replace(flags, save=save, load=load)
    _current.context = dataclasses.replace(run, config=dataclasses.replace(run.config, checkpoint=checkpoint))
    _current.record = None  # it is that of the folders


def keep_attributes(args: argparse.Namespace) -> None:
    """Gives `get_args()` the attributes that a script has written onto the result of `parse_args`."""
    known = _current.arguments.as_dict()
    for name, value in vars(args).items():
        if name not in (*known, "config", "_line") and field_of_name(name) is None:
            setattr(_current.arguments, name, value)


def serve_plugin() -> None:
    """Makes the current run one that Accelerate's plugin drives."""
    run, own = current_run(), _current.arguments
    arguments = PluginArguments(run.config, run.state, padded_vocab_size=own.padded_vocab_size)
    arguments._own.update(own._own)
    _current.arguments, _current.plugin = arguments, True


def drives_plugin() -> bool:
    """Returns whether Accelerate's plugin drives the current run."""
    return _current.plugin


def open_tensorboard_writer() -> Any:
    """Returns the writer of --tensorboard-dir, which it opens if no log has; None on ranks that do not log."""
    run = current_run()
    if _current.tensorboard_writer is None and run.config.logging.tensorboard_dir and run.environment.logs:
        from torch.utils.tensorboard import SummaryWriter

        _current.tensorboard_writer = SummaryWriter(run.config.logging.tensorboard_dir)
    return _current.tensorboard_writer


def clear_current_run() -> None:
    """Forgets the current run, its arguments, timers and tokenizer."""
    vars(_current).clear()


destroy_global_vars = unset_global_variables = clear_current_run
"""Megatron-LM's names."""


def shared_record(made: RewindRecord) -> RewindRecord:
    """Returns the record that all calls of `load_checkpoint` and `save_checkpoint` in the current run share. The first
    call stores `made` as this record."""
    _current.record = _current.record or made
    return _current.record


def let_script_count(allowed: bool) -> None:
    """Sets whether the script may write the state of training: `args.iteration`, `args.consumed_train_samples`."""
    _current.script_counts = allowed


def current_run() -> "Context":
    """Returns the run that was set up last, for Megatron-LM's functions that take no config. Raises UserError if there
    is none."""
    if _current.context is None:
        raise UserError("there is no run yet: this works inside the functions that are handed to pretrain()")
    return _current.context


def set_args(args: Any) -> None:
    """Makes `args` the result of `get_args()`, for scripts that parse a command line of their own."""
    _current.arguments = args


def set_global_variables(args: Any, build_tokenizer: bool = True) -> None:
    """Sets arguments, timers, the number of micro-batches and the tokenizer from `args`, the result of `validate_args`,
    without starting a run. `initialize_megatron` does all of it, and makes the process groups."""
    set_args(args)
    _current.timers = Timers(log_level=args.timing_log_level, log_option=args.timing_log_option)
    config = args.config
    if config is None:
        raise UserError("set_global_variables(args): give it the result of validate_args(args)")
    use_schedule(BatchSchedule.from_config(config.training, args.data_parallel_size, config.data.seq_length))
    if build_tokenizer:
        _current.tokenizer = build_tokenizer_of_config(config.tokenizer)


def get_args() -> Any:
    """Returns settings and state of the run, a `LiveArguments`; or what `set_args` was given. Raises UserError before a
    run is set up."""
    if _current.arguments is None:
        raise UserError("get_args() works once the run is set up: inside the functions that are handed to pretrain()")
    return _current.arguments


def set_signal_handler(handler: DistributedSignalHandler | None) -> None:
    """Sets the result of `get_signal_handler()`."""
    _current.signal_handler = handler


def get_signal_handler() -> DistributedSignalHandler:
    """Returns the handler of --exit-signal, for scripts with a loop of their own. Raises UserError without
    `initialize_megatron` and the flag --exit-signal-handler."""
    if _current.signal_handler is None:
        raise UserError("get_signal_handler() works after initialize_megatron(), with the flag --exit-signal-handler")
    return _current.signal_handler


def remembered_signal() -> int | None:
    """Returns the number of the signal that the handler of --exit-signal has remembered on this rank; None without."""
    return None if _current.signal_handler is None else _current.signal_handler.received


def get_tokenizer() -> "Tokenizer":
    """Returns the run's tokenizer. Raises UserError before a run is set up."""
    if _current.tokenizer is None:
        raise UserError("get_tokenizer() works once the run is set up")
    return _current.tokenizer


def get_timers() -> Timers:
    """Returns the run's timers, or silent ones if it has none."""
    if _current.timers is None:
        _current.timers = Timers(log_level=0, log_option="max")
    return _current.timers


def get_tensorboard_writer() -> Any:
    """Returns torch's SummaryWriter of --tensorboard-dir, into which the app's log writes, too. None without the flag,
    on ranks that do not log (one of the last stage does), and before the first step."""
    return _current.tensorboard_writer


def get_wandb_writer() -> Any:
    """Returns an object that scripts use like the module wandb, for the run of --wandb-project. None where
    `get_tensorboard_writer` returns None."""
    return _current.wandb_writer


def get_one_logger() -> None:
    """Returns None: NVIDIA's one-logger is not supported."""
    return


def get_adlr_autoresume() -> None:
    """Returns None: NVIDIA's autoresume is not supported. --exit-signal-handler and --exit-duration-in-mins save and
    end a run."""
    return
