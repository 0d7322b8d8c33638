"""How long to train, and in which batches."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_yet


@dataclass(kw_only=True, frozen=True)
class TrainingConfig:
    """Batches and iterations."""

    micro_batch_size: int
    """Sequences that one rank takes through the model at once. Required."""

    global_batch_size: int
    """Sequences of one step, over all ranks; micro batch size x data parallel ranks when not given."""

    rampup_batch_size: list[int] | None = flag(None, nargs=3)
    """Begin with a smaller global batch: first size, increment, and samples over which it grows to --global-batch-size.
    Needs --train-samples."""

    decrease_batch_size_if_needed: bool = False
    """Round the global batch down to what the data parallel ranks can share evenly."""

    step_batch_size_schedule: str | None = not_yet(None)
    """Global batch sizes from given numbers of tokens on."""

    train_iters: int
    """Steps to train, over all runs. This or --train-samples is required, except for a dry run or --skip-train."""

    train_samples: int | None = None
    """Sequences to train on, over all runs, instead of --train-iters."""

    exit_interval: int | None = None
    """Save and exit after an iteration that this divides."""

    exit_duration_in_mins: int | None = None
    """Save and exit once so many minutes have passed."""

    manual_gc: bool = False
    """Run Python's garbage collector at chosen steps only, the same on every rank."""

    manual_gc_interval: int = flag(0, only_with="manual_gc")
    """With --manual-gc: steps between two collections; 0: none."""

    manual_gc_eval: bool = flag(
        True, off="--no-manual-gc-eval", aliases=["--disable-manual-gc-eval"], only_with="manual_gc"
    )
    """With --manual-gc: collect before and after evaluation."""

    empty_unused_memory_level: Literal[0, 1, 2] = flag(
        0, no_effect="buffers keep their place through the run; there is little for torch's allocator to give back"
    )
    """How often to give cached GPU memory back."""

    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""

    disable_jit_fuser: bool = flag(False, no_effect="nothing is compiled behind your back")
    """No just-in-time fusion."""

    optimizer_cuda_graph: bool = not_yet(False)
    """Replay the optimizer's step as a CUDA graph."""

    enable_experimental: bool = flag(False, no_effect="there is no switch before new features; each has its own flag")
    """Allow experimental features."""

    sft: bool = not_yet(False)
    """Fine-tune on conversations."""

    dry_run: bool = False
    """Check everything, print what the run would be (parameters, tokens, bytes) and exit: 0, or 2 on errors. The number
    of ranks is WORLD_SIZE."""

    print_config: bool = False
    """Print every value and where it comes from: default, flag or derived."""

    layout_invariant: bool = False
    """Refuse settings whose result depends on how the run is spread over ranks."""
