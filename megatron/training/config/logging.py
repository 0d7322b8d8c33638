"""What a run says of itself: lines, metrics, TensorBoard, profiles."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_yet

_TENSORBOARD = "tensorboard_dir"
_TIMING = "not yet: the time of whole steps is logged, not of their parts"
_WANDB = "not yet: metrics go to metrics.jsonl and to TensorBoard"


@dataclass(kw_only=True, frozen=True)
class LoggingConfig:
    """Logs and profiles."""

    log_interval: int = 100
    """Steps between two log lines."""

    metrics_path: str | None = None
    """File for the metrics of every step, one JSON object a line; metrics.jsonl beside --save when not given."""

    log_throughput: bool = False
    """Put TFLOP/s a GPU into the log line."""

    log_params_norm: bool = False
    """Log the 2-norm of all weights."""

    log_progress: bool = not_yet(False)
    """Keep a file of progress beside --save."""

    logging_level: int | None = None
    """Level of Python's loggers, as a number: 10 debug, 20 info, 30 warning, 40 error."""

    timing_log_level: Literal[0, 1, 2] = flag(0, no_effect=_TIMING)
    """Detail of timing: 0 the step alone, 1 its parts, 2 everything."""

    timing_log_option: Literal["max", "minmax", "all"] = flag("minmax", no_effect=_TIMING)
    """Over ranks, log the longest time, shortest and longest, or all."""

    # TensorBoard -----------------------------------------------------------------------------------------------------

    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""

    tensorboard_log_interval: int = flag(1, only_with=_TENSORBOARD)
    """Steps between two points in TensorBoard."""

    tensorboard_queue_size: int = flag(1000, only_with=_TENSORBOARD)
    """Points that wait before they are written."""

    log_timers_to_tensorboard: bool = flag(False, only_with=_TENSORBOARD)
    """Timers in TensorBoard."""

    log_memory_to_tensorboard: bool = flag(False, only_with=_TENSORBOARD)
    """Memory in TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = flag(False, only_with=_TENSORBOARD)
    """Perplexity of validation in TensorBoard."""

    log_world_size_to_tensorboard: bool = flag(False, only_with=_TENSORBOARD)
    """Number of ranks in TensorBoard."""

    log_loss_scale_to_tensorboard: bool = flag(
        True,
        off="--no-log-loss-scale-to-tensorboard",
        aliases=["--disable-log-loss-scale-to-tensorboard"],
        only_with=_TENSORBOARD,
    )
    """Loss scale in TensorBoard."""

    # Weights & Biases ------------------------------------------------------------------------------------------------

    wandb_project: str | None = flag(None, no_effect=_WANDB)
    """Project on Weights & Biases."""

    wandb_exp_name: str | None = flag(None, only_with="wandb_project")
    """Name of the run on Weights & Biases."""

    wandb_entity: str | None = flag(None, only_with="wandb_project")
    """Whose project it is."""

    wandb_save_dir: str | None = flag(None, only_with="wandb_project")
    """Folder for its local files."""

    # Profiling -------------------------------------------------------------------------------------------------------

    profile: bool = False
    """Profile some steps: with Nsight Systems, or --use-pytorch-profiler."""

    use_pytorch_profiler: bool = flag(False, only_with="profile")
    """With --profile: profile with PyTorch's profiler, into --tensorboard-dir."""

    profile_step_start: int = flag(10, only_with="profile")
    """With --profile: first step."""

    profile_step_end: int = flag(12, only_with="profile")
    """With --profile: step before which it ends."""

    profile_ranks: list[int] = flag(default_factory=lambda: [0], nargs="+", only_with="profile")
    """With --profile: ranks."""

    record_shapes: bool = flag(False, only_with="profile")
    """With --profile: record the shapes of tensors."""

    pytorch_profiler_collect_shapes: bool = flag(False, only_with="use_pytorch_profiler")
    """With --use-pytorch-profiler: record the shapes of tensors."""

    pytorch_profiler_collect_callstack: bool = flag(False, only_with="use_pytorch_profiler")
    """With --use-pytorch-profiler: record where in the code each operator was called."""

    record_memory_history: bool = not_yet(False)
    """Record allocations of GPU memory."""
