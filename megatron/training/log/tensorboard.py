"""Writes scalars under Megatron-LM's tags, for TensorBoard and for Weights & Biases."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.core.exceptions import UserError
from megatron.core.utils.files import write_atomically
from megatron.training.log.console_line import perplexity
from megatron.training.log.event_files import VS_SAMPLES, supersede_events
from megatron.training.log.memory import memory_report
from megatron.training.log.records import LogWriter, Speed, StepRecord, TaskRecord, ValidationRecord
from megatron.training.state import TrainState


@dataclass(frozen=True, kw_only=True)
class TagChoices:
    """The optional tags to write, whose fields have the names of their flags, and the values of two of them."""

    tensorboard_log_interval: int = 1
    log_timers_to_tensorboard: bool = False
    log_loss_scale_to_tensorboard: bool = True
    log_validation_ppl_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    log_world_size_to_tensorboard: bool = False
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device of this rank, whose memory is written."""


class ScalarLog(LogWriter):
    """Turns records into scalars under Megatron-LM's tags and passes them to `write(tag, value, step)`.

    Tags with "vs samples" count consumed samples instead of iterations. Memory is that of this rank.
    """

    def __init__(
        self,
        write: Callable[[str, float, int], None],
        choices: TagChoices,
        *,
        close: Callable[[], None] = lambda: None,
        tensorboard: Any = None,
        wandb: "WandbWriter | None" = None,
        go_back: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        self.tensorboard, self.wandb = tensorboard, wandb
        self._go_back = go_back
        self._write = write
        self._choices = choices
        self._close = close

    def steps(self, steps: Sequence[StepRecord], speed: Speed) -> None:
        """Writes the scalars of each iteration."""
        for step in steps:
            if self.wandb is not None:
                self.wandb.write_until(step.iteration)
            if step.iteration % self._choices.tensorboard_log_interval == 0:
                self._step(step)
            times = step.times if self._choices.log_timers_to_tensorboard else {}
            # These are filled once a log line.
            for tag, value in {**step.reported, **{f"{name}-time": s for name, s in times.items()}}.items():
                self._both(tag, value, step.iteration, step.consumed_samples)
            for tag, measured in (("energy-per-gpu", step.energy_joules), ("power-per-gpu", step.power_watts)):
                if measured is not None:
                    self._both(tag, measured, step.iteration, step.consumed_samples)
            if step.memory is not None and step.memory.device_used is not None:
                self._write("mem-device-used-bytes", step.memory.device_used, step.iteration)
        if steps:
            self._interval(steps[-1], speed)

    def validation(self, record: ValidationRecord) -> None:
        """Writes the losses of an evaluation."""
        for name, loss in record.losses.items():
            tag = f"{name} {record.split}"
            self._both(tag, loss, record.iteration, record.consumed_samples)
            if self._choices.log_validation_ppl_to_tensorboard:
                self._both(f"{tag} ppl", perplexity(loss), record.iteration, record.consumed_samples)

    def task(self, record: TaskRecord) -> None:
        """Writes the scores of a task, and their standard errors."""
        for metric, pair in record.scores.items():
            for tag, value in zip((metric, f"{metric} stderr"), pair, strict=True):
                if value is not None:
                    self._both(f"eval/{record.task}/{tag}", value, record.iteration, record.consumed_samples)

    def went_back(self, iteration: int) -> None:
        """Moves the points beyond this iteration aside."""
        self._go_back(iteration)

    def close(self) -> None:
        """Closes the file."""
        if self.wandb is not None:
            self.wandb.write_until(None)
        self._close()

    def _step(self, step: StepRecord) -> None:
        scalars: dict[str, float | None] = {"learning-rate": step.learning_rate, "batch-size": step.global_batch_size}
        scalars["decoupled-learning-rate"] = step.decoupled_learning_rate
        scalars |= step.losses
        if self._choices.log_loss_scale_to_tensorboard:
            scalars["loss-scale"] = step.loss_scale
        scalars |= {"grad-norm": step.grad_norm, "num-zeros": step.num_zeros, "params-norm": step.params_norm}
        scalars["max-attention-logit"] = step.max_attention_logit
        for tag, value in scalars.items():
            if value is not None:
                self._both(tag, value, step.iteration, step.consumed_samples)

    def _interval(self, last: StepRecord, speed: Speed) -> None:
        iteration = last.iteration
        if self._choices.log_timers_to_tensorboard:
            self._both("iteration-time", speed.seconds_per_iteration, iteration, last.consumed_samples)
        if speed.tflops_per_device is not None:
            self._both("throughput", speed.tflops_per_device, iteration, last.consumed_samples)
        if speed.mfu is not None:
            self._both("mfu", speed.mfu, iteration, last.consumed_samples)
        if self._choices.log_world_size_to_tensorboard:
            self._both("world-size", self._choices.world_size, iteration, last.consumed_samples)
        if self._choices.log_memory_to_tensorboard:
            self._memory(iteration)

    def _memory(self, iteration: int) -> None:
        report = memory_report(self._choices.device)
        tags = {
            "mem-reserved-bytes": report.device_reserved,
            "mem-allocated-bytes": report.device_allocated,
            "mem-max-allocated-bytes": report.device_peak_allocated,
            "mem-allocated-count": report.device_allocations,
            "mem-host-resident-bytes": report.host_resident,
        }
        for tag, value in tags.items():
            if value is not None:
                self._write(tag, value, iteration)

    def _both(self, tag: str, value: float, iteration: int, samples: int) -> None:
        self._write(tag, value, iteration)
        self._write(f"{tag}{VS_SAMPLES}", value, samples)


def tensorboard_log(
    directory: str | Path,
    choices: TagChoices,
    *,
    queue_size: int = 1000,
    state: TrainState | None = None,
    evaluates_again: bool = False,
) -> ScalarLog:
    """Returns a writer of event files. Raises UserError if the tensorboard package is missing or the folder cannot be
    written. Points of earlier runs in the folder that are beyond `state`, the counts of this run, are moved aside
    (`supersede_events`); so they are when the run goes back.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            f"--tensorboard-dir {directory} needs the package tensorboard: pip install tensorboard, or drop the flag"
        ) from error
    _move_aside(directory, state or TrainState(), evaluates_again)
    try:
        writer: Any = SummaryWriter(log_dir=str(directory), max_queue=queue_size)
    except OSError as error:
        raise UserError(f"--tensorboard-dir {directory} cannot be written: {error.strerror or error}") from error
    events = _EventFiles(writer, directory)

    def go_back(iteration: int) -> None:
        events.close()  # the next point begins another file
        _move_aside(directory, state or TrainState(iteration))

    return ScalarLog(events.add, choices, close=events.close, tensorboard=writer, go_back=go_back)


def _move_aside(directory: str | Path, state: TrainState, evaluates_again: bool = False) -> None:
    try:
        for sentence in supersede_events(
            Path(directory), state.iteration, state.consumed_train_samples, evaluates_again
        ):
            print(sentence, flush=True)
    except (OSError, ValueError) as error:
        print(
            f"warning: --tensorboard-dir {directory}: {error}; points beyond iteration {state.iteration} stay, so that "
            "some iterations will be there twice",
            flush=True,
        )


class _EventFiles:
    """A SummaryWriter that does not end the run when the disk is full. Its thread ends with the first failed write;
    from then on points are dropped, and a line says so."""

    def __init__(self, writer: Any, directory: str | Path) -> None:
        self._writer, self._directory = writer, directory

    def add(self, tag: str, value: float, step: int) -> None:
        self._do(lambda: self._writer.add_scalar(tag, value, step))

    def close(self) -> None:
        self._do(lambda: self._writer.close())

    def _do(self, action: Callable[[], object]) -> None:
        if self._writer is None:
            return
        try:
            action()
        except OSError as error:
            self._writer = None
            print(
                f"warning: --tensorboard-dir {self._directory}: {error.strerror or error}; points are dropped from "
                "here on",
                flush=True,
            )


class WandbWriter:
    """The module wandb for scripts. `log(values, step)` waits until the run has logged the iterations before `step`,
    because Weights & Biases drops values whose step is earlier than that of another value before them."""

    def __init__(self, module: Any, run: Any) -> None:
        self._module, self._run = module, run
        self._waiting: list[tuple[int, Any, dict[str, Any]]] = []

    def log(self, data: Any, step: int | None = None, **more: Any) -> None:
        """Logs the values of a script."""
        if step is None:
            self._run.log(data, **more)
        else:
            self._waiting.append((step, data, more))

    def write_until(self, iteration: int | None) -> None:
        """Sends the values that wait for this iteration or an earlier one; None: all of them."""
        due = [entry for entry in self._waiting if iteration is None or entry[0] <= iteration]
        self._waiting = [entry for entry in self._waiting if iteration is not None and entry[0] > iteration]
        for step, data, more in sorted(due, key=lambda entry: entry[0]):
            self._run.log(data, step, **more)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def wandb_log(
    project: str,
    choices: TagChoices,
    *,
    name: str,
    entity: str | None = None,
    save_dir: str | None = None,
    config: dict[str, Any] | None = None,
    id_file: Path | None = None,
    resumed: bool = False,
) -> ScalarLog:
    """Returns a writer that sends the same scalars to Weights & Biases. Raises UserError without the wandb package,
    if `save_dir` cannot be made, and if the service cannot be reached or refuses the login.

    Steps must increase there, so the tags "vs samples" are left out. `id_file` keeps the id of the run there. If this
    run is `resumed` and the file exists, it continues that run, which drops the steps that it has already. The variable
    WANDB_RUN_ID has precedence.
    """
    try:
        import wandb  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise UserError(
            f"--wandb-project {project} needs the package wandb: pip install wandb, or drop the flag"
        ) from error
    try:
        if save_dir is not None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--wandb-save-dir {save_dir} cannot be written: {error.strerror or error}") from error
    known = kept_run_id(id_file, resumed, "WANDB_RUN_ID")
    identity: dict[str, Any] = {} if known is None else {"id": known, "resume": "allow"}
    try:
        run: Any = wandb.init(project=project, name=name, entity=entity, dir=save_dir, config=config, **identity)
    except wandb.Error as error:
        raise UserError(
            f"--wandb-project {project}: {error}; WANDB_MODE=offline keeps the metrics on disk, for `wandb sync` later"
        ) from error

    def write(tag: str, value: float, step: int) -> None:
        if not tag.endswith(VS_SAMPLES):
            run.log({tag: value}, step)

    keep_run_id(id_file, getattr(run, "id", None), "Weights & Biases")
    writer = WandbWriter(wandb, run)
    return ScalarLog(write, choices, close=run.finish, wandb=writer)


def kept_run_id(id_file: Path | None, resumed: bool, variable: str) -> str | None:
    """Returns the id under which a service knows the run that is resumed; None for a new run, and if the environment
    variable gives an id."""
    if id_file is None or not resumed or variable in os.environ:
        return None
    try:
        return id_file.read_text("utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def keep_run_id(id_file: Path | None, run_id: str | None, service: str) -> None:
    """Writes the id of the run to a file. A warning says so if it cannot be written."""
    if id_file is None or run_id is None:
        return
    try:
        id_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(id_file, f"{run_id}\n")
    except OSError as error:
        print(
            f"warning: {id_file}: {error.strerror or error}; if this run is resumed, {service} will show a second run",
            flush=True,
        )
