"""Records that the log of a run consists of, and the interface of everything that writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from torch import Tensor

from megatron.core.optimizer import StepUpdate
from megatron.training.log.memory import MemoryReport
from megatron.training.loss_spikes import SpikeVerdict


@dataclass(frozen=True)
class StepResult:
    """The results of one training step, as `loop.train_step` returns them and the log reads them. Every tensor is still
    on the device."""

    reports: Sequence[Mapping[str, Tensor]]
    """The reporting dict of the loss function for each micro-batch: [sum, count], or one value. Empty where the loss is
    not computed."""
    update: StepUpdate
    learning_rate: Tensor
    """Rate of this update, for parameters without a rate of their own."""
    loss_scale: Tensor
    global_batch_size: int
    """Samples of the step, over all ranks."""
    decoupled_learning_rate: Tensor | None = None
    """Rate of this update for the embedding and the output layer, if --decoupled-lr is given."""
    params_norm: Tensor | None = None
    """2-norm of all weights after the update; only for a log line with --log-params-norm."""
    spike: SpikeVerdict | None = None
    """The judgement of --loss-spike-action about the loss; None without the flag."""
    sample_ids: Sequence[Sequence[int]] = ()
    """Ids of the samples of each micro-batch on this rank."""
    gradients_finite: Sequence[Tensor] = ()
    """For each micro-batch, whether the gradient at the embedding is finite; empty if gradients are not probed."""


@dataclass(frozen=True)
class StepRecord:
    """The values of one training iteration, on the host. Only `reported` is averaged over iterations."""

    iteration: int
    losses: Mapping[str, float]
    """Mean over the global batch, by the name in the report of the loss function. Empty off the last pipeline stage."""
    applied: bool = True
    """False: the update was skipped."""
    consumed_samples: int = 0
    """Samples consumed by the run after this iteration."""
    tokens: int = 0
    """Tokens consumed by the run after this iteration."""
    global_batch_size: int = 0
    learning_rate: float | None = None
    decoupled_learning_rate: float | None = None
    """Rate of the embedding and the output layer; None without --decoupled-lr."""
    loss_scale: float | None = None
    grad_norm: float | None = None
    params_norm: float | None = None
    max_attention_logit: float | None = None
    num_zeros: int | None = None
    loss_z_score: float | None = None
    """How far the loss is above the mean of earlier losses, in their standard deviations. None without
    --loss-spike-action, and until there are enough losses."""
    loss_spike: bool = False
    """Whether the update was left out because of this loss."""
    by_source: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """For a blend: mean loss and number of tokens of each data set in the global batch. Keys are `lm loss on source
    NAME`."""
    mix: Mapping[str, float] = field(default_factory=dict)
    """For a blend, in the record of an interval's last iteration: share of each data set in the run's samples."""
    reported: Mapping[str, float] = field(default_factory=dict)
    """Values that layers report, by tag: means over the iterations since the last record that has any."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the parts of an iteration, on the rank that took longest: means over the iterations since the last
    record that has any. Empty unless --timing-log-level asks for them."""
    memory: MemoryReport | None = None
    """Memory of the rank that logs, in the record of an interval's last iteration."""
    seconds_left: float | None = None
    """Time until the last iteration at the interval's speed, without evaluations and saves; given where `memory` is."""
    energy_joules: float | None = None
    """Energy of a GPU in an iteration, and its power: means over ranks and the iterations of a log line, in the record
    of its last iteration. None unless --log-energy asks for them and they are known."""
    power_watts: float | None = None


@dataclass(frozen=True)
class Speed:
    """Rates of the steps of an interval, without evaluation and saving."""

    seconds_per_iteration: float
    tokens_per_second: float | None = None
    """Tokens that all ranks together process in a second."""
    tflops_per_device: float | None = None
    mfu: float | None = None
    """Model FLOP utilisation, 0 to 1. None: the peak of this device is not known."""


@dataclass(frozen=True)
class LogRecord:
    """The values of a log line (see `console_line.format_line`)."""

    time: datetime
    step: StepRecord
    """The last iteration of the interval."""
    train_iters: int
    losses: Mapping[str, float]
    """Averages over the iterations since the last line whose updates were applied. The losses that layers add come
    last; they are averaged over all iterations since the last line."""
    speed: Speed
    """The speed over all iterations since the last line."""
    shows_throughput: bool = False
    """Whether Megatron-LM's line has the throughput."""
    skipped_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    times: str | None = None
    """The lines of --timing-log-level, which follow the log line."""


@dataclass(frozen=True)
class ValidationRecord:
    """The result of one evaluation."""

    iteration: int
    losses: Mapping[str, float]
    split: str = "validation"
    where: str | None = None
    """Name of this evaluation in the printed line; None: `iteration N`."""
    consumed_samples: int = 0
    tokens: int | None = None
    """Number of tokens that the losses are the mean over."""
    samples: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class TaskRecord:
    """The scores of one evaluation task."""

    iteration: int
    task: str
    scores: Mapping[str, tuple[float, float | None]]
    """By metric: the score, and its standard error, which a single document does not have."""
    documents: int
    consumed_samples: int = 0


@dataclass(frozen=True)
class Event:
    """Something that happens once: a save, a resume, an exit, a non-finite loss."""

    name: str
    iteration: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further values, of JSON's types."""


class LogWriter:
    """Writes records to one place. Every method is optional; only the rank that logs has writers."""

    tensorboard: object = None
    """torch's SummaryWriter, if the records go there."""
    wandb: Any = None
    """A `tensorboard.WandbWriter`, if the records go there."""

    def steps(self, steps: Sequence[StepRecord], speed: Speed) -> None:
        """Iterations since the last call, in order; every iteration comes exactly once."""

    def line(self, record: LogRecord) -> None:
        """A log line is due."""

    def validation(self, record: ValidationRecord) -> None:
        """An evaluation ended."""

    def task(self, record: TaskRecord) -> None:
        """An evaluation task was scored."""

    def event(self, event: Event) -> None:
        """An event happened."""

    def went_back(self, iteration: int) -> None:
        """The run goes back to the state after this iteration; later iterations come again."""

    def progress(self, iteration: int) -> None:
        """Called after every iteration, without any value from the device; must be cheap."""

    def close(self) -> None:
        """Writes what is still buffered."""
