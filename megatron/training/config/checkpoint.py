"""What is saved and loaded, when, and how many are kept."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_yet

_SYNC = "checkpoints are written before the next step"
_FULL = "ranks always share the work of writing and reading, evenly by bytes"
_ANY = "any layout loads any checkpoint"

Strictness = Literal[
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
]


@dataclass(kw_only=True, frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = None
    """Folder to save checkpoints into."""

    save_interval: int | None = flag(None, aliases=["--persistent-save-interval"], only_with="save")
    """Steps between two checkpoints; without, one is saved when the run ends."""

    keep_last: int | None = flag(None, only_with="save")
    """Checkpoints to keep; older ones are deleted once a newer one is complete. All when not given."""

    save_retain_interval: int | None = flag(None, no_effect="not yet: all checkpoints are kept, or --keep-last of them")
    """Steps between checkpoints that are kept; others are deleted."""

    load: str | None = None
    """Folder to load from: its newest whole checkpoint. One that holds none starts a new run, and says so."""

    ckpt_step: int | None = None
    """Load the checkpoint of this iteration instead of the newest."""

    exit_on_missing_checkpoint: bool = False
    """With --load: stop if there is no checkpoint instead of starting a new run."""

    pretrained_checkpoint: str | None = None
    """Folder to take weights from when --load holds no checkpoint, as --finetune does."""

    finetune: bool = False
    """Load weights only and begin at iteration 0."""

    no_save_optim: bool = False
    """Leave the optimizer's state out of checkpoints."""

    no_save_rng: bool = flag(False, no_effect="there is no random state to save")
    """Leave random states out of checkpoints."""

    no_load_optim: bool = False
    """Do not load the optimizer's state."""

    no_load_rng: bool = flag(False, no_effect="there is no random state to load")
    """Do not load random states."""

    use_checkpoint_args: bool = False
    """Take the flags of the model from the checkpoint of --load, or else of --pretrained-checkpoint, whatever the
    command line says; and those of the tokenizer where it says nothing."""

    dist_ckpt_strictness: Strictness = "assume_ok_unexpected"
    """What to do about tensors that a checkpoint lacks or has too many: stop, naming them, unless this is ignore_all or
    one of the log_ words, which print them and go on."""

    ckpt_waive_keys: list[str] | None = flag(None, nargs="+")
    """Shell patterns (as 'output_layer.*') of tensors that a checkpoint may lack, or hold without use, on loading."""

    ckpt_format: Literal["safetensors", "torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] = "safetensors"
    """Format of checkpoints. There is one: any other word saves in it too, and says so."""

    auto_detect_ckpt_format: bool = flag(False, no_effect="a checkpoint's manifest says what it is")
    """Find out a checkpoint's format on loading."""

    dist_ckpt_format_deprecated: str | None = flag(
        None, on="--dist-ckpt-format", no_effect="--ckpt-format took its place"
    )
    """Of older releases: format of checkpoints."""

    use_dist_ckpt_deprecated: bool = flag(False, on="--use-dist-ckpt", no_effect="there is one format")
    """Of older releases: distributed checkpoints."""

    async_save: bool = flag(False, no_effect=f"not yet asynchronous: {_SYNC}")
    """Write checkpoints while training goes on."""

    async_strategy: Literal["nvrx", "mcore"] = flag("nvrx", only_with="async_save")
    """With --async-save: who writes."""

    async_ckpt_use_cpu_shm: bool = flag(False, only_with="async_save")
    """With --async-save: stage tensors in shared memory."""

    use_persistent_ckpt_worker: bool = flag(False, only_with="async_save")
    """With --async-save: keep the writing process between checkpoints."""

    ckpt_fully_parallel_save: bool = flag(
        True, off="--no-ckpt-fully-parallel-save", aliases=["--disable-ckpt-fully-parallel-save"], no_effect=_FULL
    )
    """Data parallel ranks share the writing."""

    ckpt_fully_parallel_save_deprecated: bool = flag(False, on="--ckpt-fully-parallel-save", no_effect=_FULL)
    """Of older releases: data parallel ranks share the writing."""

    ckpt_fully_parallel_load: bool = flag(False, no_effect=_FULL)
    """Data parallel ranks share the reading."""

    ckpt_assume_constant_structure: bool = flag(
        False, no_effect="a checkpoint's plan is computed without communication"
    )
    """Plan checkpoints once."""

    dist_ckpt_optim_fully_reshardable: bool = flag(False, no_effect=_ANY)
    """Save the optimizer's state so that other layouts can load it."""

    distrib_optim_fully_reshardable_mem_efficient: bool = flag(False, no_effect=_ANY)
    """The same, with less memory."""

    verify_integrity: bool = flag(False, no_effect="files carry checksums, and loading checks them, always")
    """Write checksums and check them on loading."""

    non_persistent_save_interval: int | None = not_yet(None)
    """Steps between checkpoints of which only the last is kept."""

    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = flag(
        None, only_with="non_persistent_save_interval"
    )
    """With --non-persistent-save-interval: where they are kept."""
