"""What a run writes about itself: log lines, metrics, TensorBoard, profiles, tensors of single steps."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag, literal_text, too_small

_TENSORBOARD = "tensorboard_dir"
_WANDB = "wandb_project"
_SERVICES = (_WANDB, "log_to")
KINDS = ("params", "wgrads", "dgrads", "activations", "tokens_per_expert")
"""What the files of single steps contain."""


@dataclass(kw_only=True, frozen=True)
class LoggingConfig:
    """Logs and profiles."""

    log_interval: int = 100
    """Steps between two log lines."""

    metrics_path: str | None = None
    """File for the metrics of every step, one JSON object per line; metrics.jsonl in the folder of --save when not
    given."""

    log_throughput: bool = False
    """Add TFLOP/s per GPU to the log line."""

    log_device_memory_used: bool = False
    """Log the memory in use on the logging rank's GPU, as nvidia-smi shows it. It includes the memory of other
    processes and memory outside torch's allocator. The value goes to the memory reports, the metrics file and
    TensorBoard."""

    log_memory_interval: int | None = None
    """Steps between two memory reports. The ranks of the first replica print them. Without this flag there is one
    report, after the first step, on GPUs only."""

    log_energy: bool = False
    """Log the energy per step and the power of a GPU, as means over all GPUs, measured by NVIDIA's driver."""

    log_params_norm: bool = False
    """Log the 2-norm of all weights."""

    log_straggler: bool = False
    """At each log line, print which ranks' forward steps are fastest and slowest."""

    straggler_minmax_count: int = flag(1, only_with="log_straggler")
    """Number of fastest and of slowest ranks that are named."""

    straggler_ctrlr_port: int = flag(65535, no_effect="the detector cannot be switched during a run")
    """Port at which the detector is switched on and off."""

    disable_straggler_on_startup: bool = flag(False, only_with="log_straggler")
    """With --log-straggler: start with the detector off, until a script's own code switches it on."""

    log_style: Literal["megatron", "short"] = "megatron"
    """Form of the log line: Megatron-LM's, or a short one of at most 120 columns: step, losses, tokens per second,
    utilisation, memory and time left, with a progress bar on a terminal."""

    log_progress: bool = flag(False, only_with="save")
    """Append a line to progress.txt in the folder of --save when the run starts, saves and ends."""

    logging_level: int | None = None
    """Level of Python's loggers, as a number: 10 debug, 20 info, 30 warning, 40 error."""

    timing_log_level: Literal[0, 1, 2] = 0
    """Times to print below the log line. 0: none, except for set-up and saving; 1: the main parts of a step; 2: also
    each forward, backward, message and batch."""

    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """Which ranks' times are logged: the longest (max), the shortest and the longest (minmax), or every rank's."""

    # TensorBoard -----------------------------------------------------------------------------------------------------

    tensorboard_dir: str | None = None
    """Folder for TensorBoard files."""

    tensorboard_log_interval: int = flag(1, only_with=_TENSORBOARD, or_with=_SERVICES)
    """Steps between two points in TensorBoard."""

    tensorboard_queue_size: int = flag(1000, only_with=_TENSORBOARD)
    """Number of TensorBoard points to collect before they are written."""

    log_timers_to_tensorboard: bool = flag(False, only_with=_TENSORBOARD, or_with=_SERVICES)
    """Write the time of a step, and the times of --timing-log-level, to TensorBoard."""

    log_memory_to_tensorboard: bool = flag(False, only_with=_TENSORBOARD, or_with=_SERVICES)
    """Write memory use to TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = flag(False, only_with=_TENSORBOARD, or_with=_SERVICES)
    """Write the validation perplexity to TensorBoard."""

    log_world_size_to_tensorboard: bool = flag(False, only_with=_TENSORBOARD, or_with=_SERVICES)
    """Write the number of ranks to TensorBoard."""

    log_loss_scale_to_tensorboard: bool = flag(
        True,
        off="--no-log-loss-scale-to-tensorboard",
        aliases=["--disable-log-loss-scale-to-tensorboard"],
        only_with=_TENSORBOARD,
        or_with=_SERVICES,
    )
    """Write the loss scale to TensorBoard."""

    # Weights & Biases ------------------------------------------------------------------------------------------------

    wandb_project: str | None = None
    """Weights & Biases project. It gets the same scalars as TensorBoard. Needs the package wandb and --wandb-exp-name;
    the environment variable WANDB_MODE=offline keeps them on disk."""

    wandb_exp_name: str | None = flag(None, only_with=_WANDB)
    """Weights & Biases: name of the run."""

    wandb_entity: str | None = flag(None, only_with=_WANDB)
    """Weights & Biases: user or team that owns the project."""

    wandb_save_dir: str | None = flag(None, only_with=_WANDB)
    """Weights & Biases: folder for local files; the folder of --save when not given."""

    log_to: list[str] | None = flag(None, nargs="+")
    """Other services that get the scalars of TensorBoard: mlflow, comet, opentelemetry (each needs its package, and is
    configured by its environment variables), and prometheus:FILE, which writes the newest values to a text file for
    the node exporter."""

    # Profiling -------------------------------------------------------------------------------------------------------

    profile: bool = False
    """Profile some steps with Nsight Systems, or with PyTorch's profiler (--use-pytorch-profiler)."""

    use_pytorch_profiler: bool = flag(False, only_with="profile")
    """With --profile: use PyTorch's profiler and write into --tensorboard-dir."""

    nvtx_ranges: bool = flag(False, only_with="profile")
    """With --profile: mark the parts of a step (forward, backward, communication of gradients, optimizer, data) as NVTX
    ranges for Nsight Systems, with the names of the timers of --timing-log-level 2."""

    profile_step_start: int = flag(10, only_with="profile")
    """With --profile: first step that is profiled."""

    profile_step_end: int = flag(12, only_with="profile")
    """With --profile: profiling stops before this step."""

    profile_ranks: list[int] = flag(
        default_factory=lambda: [0], nargs="+", only_with="profile", or_with="record_memory_history"
    )
    """With --profile and --record-memory-history: ranks that are recorded."""

    record_shapes: bool = flag(False, only_with="profile")
    """With --profile: record the shapes of tensors."""

    pytorch_profiler_collect_shapes: bool = flag(False, only_with="use_pytorch_profiler")
    """With --use-pytorch-profiler: record the shapes of tensors."""

    pytorch_profiler_collect_callstack: bool = flag(False, only_with="use_pytorch_profiler")
    """With --use-pytorch-profiler: record where in the code each operator was called."""

    pytorch_profiler_collect_chakra: bool = flag(False, only_with="use_pytorch_profiler")
    """With --use-pytorch-profiler: also write the graph of operators, as a PyTorch execution trace that Chakra's
    converter reads."""

    record_memory_history: bool = False
    """Record allocations of GPU memory on the ranks of --profile-ranks. They are written at each log line and when the
    run ends, also if it runs out of memory. https://pytorch.org/memory_viz shows the file."""

    memory_snapshot_path: str = flag("snapshot.pickle", only_with="record_memory_history")
    """With --record-memory-history: file to write. Ranks other than the first add their number to the name."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        yield from too_small(self, ("log_interval", "tensorboard_log_interval", "tensorboard_queue_size"), 1)
        yield from too_small(self, ("straggler_minmax_count", "log_memory_interval"), 1)
        yield from too_small(self, ("profile_step_start",), 0)
        if self.record_memory_history and not self.profile_ranks:
            yield "{record_memory_history} needs a rank in {profile_ranks:name}"
        for service in self.log_to or ():
            if service not in ("mlflow", "comet", "opentelemetry") and not re.fullmatch("prometheus:.+", service):
                yield f"{{log_to:name}} {literal_text(service)}: mlflow, comet, opentelemetry or prometheus:FILE"
        if self.wandb_project and not self.wandb_exp_name:
            yield "{wandb_project} needs {wandb_exp_name:name}: the name of the run"
        if self.profile and self.profile_step_end <= self.profile_step_start:
            yield "{profile_step_end} must be larger than {profile_step_start}"


@dataclass(kw_only=True, frozen=True)
class RecordsConfig:
    """Tensors of single steps, which each rank writes to safetensors files, and traces of routing.

    Files are KIND/iter_NNNNNNN/rank_NNNNN.safetensors in the folder of --save. A step that writes waits for the device.
    """

    save_params_interval: int | None = flag(None, only_with="save")
    """Steps between two files with the weights after the update, by name. Each rank writes the weights that no rank
    before it holds."""

    save_wgrads_interval: int | None = flag(None, only_with="save")
    """Steps between two files with the main gradients before the update, summed over ranks and not yet clipped. Each
    rank writes the gradients that no rank before it holds."""

    save_activations_interval: int | None = flag(None, only_with="save")
    """Steps between two files with the outputs of the modules that have weights, in the first micro-batch of each
    rank."""

    save_dgrads_interval: int | None = flag(None, only_with="save")
    """Steps between two files with the gradients of the loss with respect to those outputs, in the first micro-batch
    of each rank."""

    save_tokens_per_expert_interval: int | None = flag(None, only_with=("save", "num_moe_experts"))
    """Steps between two files with the number of this rank's tokens that each router sends to each expert, summed over
    micro-batches, before tokens are dropped."""

    moe_routing_trace_path: str | None = flag(None, only_with="num_moe_experts")
    """Folder for traces of routing: rank_NNNNN.jsonl has a line for each router and micro-batch, with iteration, layer,
    and experts and weights of each token of this rank."""

    moe_routing_trace_max_training_iters: int | None = flag(None, only_with="moe_routing_trace_path")
    """With --moe-routing-trace-path: number of iterations to trace; all when not given."""

    moe_routing_trace_capture_logits: bool = flag(False, only_with="moe_routing_trace_path")
    """With --moe-routing-trace-path: write the router's logits too."""

    moe_routing_trace_capture_hidden_states: bool = flag(False, only_with="moe_routing_trace_path")
    """With --moe-routing-trace-path: write the router's inputs too."""

    moe_routing_trace_dump_weights: bool = flag(False, only_with="moe_routing_trace_path")
    """With --moe-routing-trace-path: write the routers' weights when the run starts, to
    weights_rank_NNNNN.safetensors."""

    def interval(self, kind: str) -> int | None:
        """Returns the steps between two files of a kind; None: it is not written."""
        value: int | None = getattr(self, f"save_{kind}_interval")
        return value

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        yield from too_small(self, (f"save_{kind}_interval" for kind in KINDS), 1)
        yield from too_small(self, ("moe_routing_trace_max_training_iters",), 1)
