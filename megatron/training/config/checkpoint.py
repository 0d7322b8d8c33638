"""What checkpoints contain, when they are saved and loaded, and how many are kept."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.core.declarations.config_fields import flag, too_small

_THREAD = "a thread of each rank writes from host memory that is kept between saves"
_FULL = "ranks always share writing and reading, with equal numbers of bytes"
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
    """Saving and loading of checkpoints."""

    save: str | None = None
    """Folder to save checkpoints into, or the URL of one in an object store (s3://bucket/run)."""

    save_interval: int | None = flag(None, aliases=["--persistent-save-interval"], only_with="save")
    """Steps between two checkpoints. Without it, one checkpoint is saved when the run ends."""

    keep_last: int | None = flag(None, only_with="save")
    """Number of checkpoints to keep. Older ones are deleted once a newer one is complete. All when not given."""

    save_retain_interval: int | None = flag(None, only_with="save")
    """Keep only checkpoints whose iteration is a multiple of this, and the newest (with --keep-last: the newest ones).
    The others are deleted once a newer one is complete."""

    load: str | None = None
    """Folder to load from, or the URL of one in an object store; its newest complete checkpoint is loaded. If it
    contains none, a new run starts and a line says so."""

    ckpt_step: int | None = None
    """Load the checkpoint of this iteration instead of the newest, from --load or, without it, from
    --pretrained-checkpoint."""

    exit_on_missing_checkpoint: bool = False
    """With --load: exit with an error if there is no checkpoint, instead of starting a new run."""

    pretrained_checkpoint: str | None = None
    """Folder to load weights from when --load contains no checkpoint. Only weights are loaded, as with --finetune."""

    load_hf: str | None = None
    """Folder of a Hugging Face model (config.json and safetensors) whose weights a new run starts from. Flags of model
    and tokenizer that are not given are read from it. A given value that makes another model is an error. A checkpoint
    under --load takes precedence."""

    save_hf_interval: int | None = flag(None, only_with="save")
    """Steps between two exports to Hugging Face folders; a multiple of --save-interval. Each export is made from a
    checkpoint and written to hf/iter_NNNNNNN in the folder of --save."""

    finetune: bool = False
    """Load weights only and start at iteration 0."""

    no_save_optim: bool = flag(False, only_with="save")
    """Do not save the optimizer's state."""

    no_save_rng: bool = flag(False, no_effect="there is no random state to save")
    """Do not save random states."""

    no_load_optim: bool = flag(False, only_with="load")
    """Do not load the optimizer's state."""

    no_load_rng: bool = flag(False, no_effect="there is no random state to load")
    """Do not load random states."""

    use_checkpoint_args: bool = flag(False, from_checkpoint=False)
    """Take the flags of model and tokenizer that the command line does not give from the checkpoint of --load or
    --pretrained-checkpoint. A given value that makes another model is an error. Code (--spec) is not taken."""

    dist_ckpt_strictness: Strictness = flag("assume_ok_unexpected", only_with="load", or_with="pretrained_checkpoint")
    """What to do if tensors are missing in a checkpoint, or if nothing loads them. ignore_all, log_unexpected and
    log_all print the names and continue. With any other value an error names the tensors."""

    ckpt_waive_keys: list[str] | None = flag(None, nargs="+", only_with="load", or_with="pretrained_checkpoint")
    """Shell patterns such as 'output_layer.*'. It is no error if a tensor with a matching name is missing in a
    checkpoint or is not loaded."""

    ckpt_format: Literal["safetensors", "torch", "torch_dist", "torch_dcp", "fsdp_dtensor", "zarr"] = "safetensors"
    """Format of checkpoints. Checkpoints are always in safetensors; for any other value a line says so."""

    auto_detect_ckpt_format: bool = flag(False, no_effect="a checkpoint's manifest says what it is")
    """Detect a checkpoint's format when it is loaded."""

    dist_ckpt_format_deprecated: str | None = flag(
        None, on="--dist-ckpt-format", no_effect="--ckpt-format has replaced it"
    )
    """Older releases: format of checkpoints."""

    use_dist_ckpt_deprecated: bool = flag(False, on="--use-dist-ckpt", no_effect="there is one format")
    """Older releases: distributed checkpoints."""

    async_save: bool = flag(False, only_with="save")
    """Write checkpoints while training continues. Training waits only while the state is copied to host memory. The
    copy needs about 12 bytes per parameter with Adam, divided among the ranks that share the parameters; for local
    copies (--non-persistent-ckpt-type local) it has all that the rank holds. The next save and the end of the run wait
    until the checkpoint is complete."""

    async_strategy: Literal["nvrx", "mcore"] = flag("nvrx", only_with="async_save", no_effect=_THREAD)
    """With --async-save: implementation."""

    async_ckpt_use_cpu_shm: bool = flag(False, only_with="async_save", no_effect=_THREAD)
    """With --async-save: stage tensors in shared memory."""

    use_persistent_ckpt_worker: bool = flag(False, only_with="async_save", no_effect=_THREAD)
    """With --async-save: keep the writing process alive between checkpoints."""

    ckpt_fully_parallel_save: bool = flag(
        True, off="--no-ckpt-fully-parallel-save", aliases=["--disable-ckpt-fully-parallel-save"], no_effect=_FULL
    )
    """Share writing among data parallel ranks."""

    ckpt_fully_parallel_save_deprecated: bool = flag(False, on="--ckpt-fully-parallel-save", no_effect=_FULL)
    """Older releases: share writing among data parallel ranks."""

    ckpt_fully_parallel_load: bool = flag(False, no_effect=_FULL)
    """Share reading among data parallel ranks."""

    ckpt_assume_constant_structure: bool = flag(
        False, no_effect="a checkpoint's plan is computed without communication"
    )
    """Plan the first checkpoint and reuse the plan for later ones."""

    dist_ckpt_optim_fully_reshardable: bool = flag(False, no_effect=_ANY)
    """Save the optimizer's state so that other layouts can load it."""

    distrib_optim_fully_reshardable_mem_efficient: bool = flag(False, no_effect=_ANY)
    """Save the optimizer's state so that other layouts can load it, with less memory."""

    verify_integrity: bool = flag(False, no_effect="files carry checksums, and loading checks them, always")
    """Write checksums, and check them when a checkpoint is loaded."""

    non_persistent_save_interval: int | None = flag(None, only_with="save")
    """Steps between two temporary checkpoints. Only the newest one is kept. --load takes it if it is newer than the
    checkpoints of --save-interval."""

    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = flag(
        None, supported=[None, "global", "local"], only_with="non_persistent_save_interval"
    )
    """With --non-persistent-save-interval: where temporary checkpoints are kept. global (the default): in a folder that
    all ranks read. local: each rank keeps its own state on its host; only a run of the same layout can load it."""

    non_persistent_global_ckpt_dir: str | None = flag(None, only_with="non_persistent_save_interval")
    """With --non-persistent-save-interval: folder of the temporary checkpoints. Default: `non_persistent` in the folder
    of --save, and of --load."""

    non_persistent_local_ckpt_dir: str | None = flag(None, only_with="non_persistent_save_interval")
    """With --non-persistent-ckpt-type local: folder on each host, for instance on its own disk, or in its memory
    (/dev/shm/run)."""

    non_persistent_local_ckpt_algo: Literal["fully_parallel", "atomic"] = flag(
        "fully_parallel",
        only_with="non_persistent_save_interval",
        no_effect="each rank keeps all that it holds, so that only lost ranks need files of others",
    )
    """With --non-persistent-ckpt-type local: how the state is divided among ranks."""

    replication: bool = flag(False, only_with="non_persistent_save_interval")
    """With --non-persistent-ckpt-type local: other ranks keep copies too, so that a run goes on without a lost host."""

    replication_jump: int | None = flag(None, only_with="replication")
    """With --replication: rank n's copies are on ranks n + jump, n + 2 jump, ... Default: the ranks of a host, so that
    copies are on other hosts; 1 on a single host."""

    replication_factor: int = flag(2, only_with="replication")
    """With --replication: copies of the state of each rank, its own included."""

    override_ckpt_iteration: int | None = flag(None, only_with="load")
    """Go on as if the checkpoint of --load had been saved after this iteration: the data continues with that
    iteration's samples. The learning rate continues where the checkpoint left it."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`. Looks at no folder."""
        intervals = ("save_interval", "save_retain_interval", "save_hf_interval", "non_persistent_save_interval")
        yield from too_small(self, (*intervals, "keep_last"), 1)
        temporary = self.non_persistent_global_ckpt_dir
        for field in ("save", "load"):
            root = getattr(self, field)
            if root is not None and temporary is not None and Path(root).absolute() == Path(temporary).absolute():
                yield (
                    f"{{non_persistent_global_ckpt_dir}} is the folder of {{{field}:name}}, where each temporary "
                    "checkpoint would replace all others; give another"
                )
                break
        local = self.non_persistent_ckpt_type == "local"
        if local != (self.non_persistent_local_ckpt_dir is not None):
            yield (
                "{non_persistent_ckpt_type} needs {non_persistent_local_ckpt_dir:name}, a folder on each host"
                if local
                else "{non_persistent_local_ckpt_dir} needs {non_persistent_ckpt_type:name} local"
            )
        if self.replication and not local:
            yield "{replication} needs {non_persistent_ckpt_type:name} local"
        yield from too_small(self, ("replication_jump",), 1)
        yield from too_small(self, ("replication_factor",), 2)
        if self.save_hf_interval and (not self.save_interval or self.save_hf_interval % self.save_interval):
            yield "{save_hf_interval}: give a multiple of {save_interval:name}, whose checkpoints are exported"
        if self.load_hf is not None and self.pretrained_checkpoint is not None:
            yield "{load_hf:name} and {pretrained_checkpoint:name} both name first weights; give one"
        yield from too_small(self, ("ckpt_step", "override_ckpt_iteration"), 0)
        if self.override_ckpt_iteration is not None and self.finetune:
            yield "{override_ckpt_iteration}: with {finetune} a run begins at iteration 0; give one of them"
        for field in ("ckpt_step", "finetune", "exit_on_missing_checkpoint"):
            if getattr(self, field) not in (None, False) and self.load is None and self.pretrained_checkpoint is None:
                yield f"{{{field}}} needs {{load:name}}: the folder to load from"
