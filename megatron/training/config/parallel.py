"""Ranks, process groups and sharding, beyond the sizes that ModelParallelConfig holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag, not_a_flag, too_small

_PIPELINE = "pipeline_model_parallel_size"
_GLOO = "there is always one small gloo group, with which ranks agree when to exit"
_CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


@dataclass(kw_only=True, frozen=True)
class ParallelConfig:
    """The grid of ranks, and how ranks communicate."""

    world_size: int = not_a_flag(1)
    """Number of processes of the run (environment variable WORLD_SIZE)."""

    data_parallel_size: int = not_a_flag(1)
    """Number of replicas of the model: world size / (tensor x pipeline x context parallel size)."""

    planned_world_size: int | None = None
    """Number of ranks that the run is planned for (tools/plan.py). --dry-run takes it if WORLD_SIZE is not set; a run
    of another number says so."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library: nccl for GPUs, gloo for CPUs; chosen by the device when not given."""

    distributed_timeout_minutes: int = 10
    """Minutes that a collective may wait for other ranks."""

    distributed_timeout_seconds_after_init: int | None = None
    """Seconds that a collective may wait for other ranks once the first step is done; --distributed-timeout-minutes
    then applies only until that time."""

    use_tp_pp_dp_mapping: bool = flag(False, only_with=_PIPELINE)
    """Order of ranks: the pipeline axis varies faster than the data parallel axis."""

    num_layers_per_virtual_pipeline_stage: int | None = flag(None, only_with=_PIPELINE)
    """Interleaved pipeline schedule: layers in each model chunk."""

    num_virtual_stages_per_pipeline_rank: int | None = flag(None, only_with=_PIPELINE)
    """Interleaved pipeline schedule: model chunks on each pipeline stage."""

    tp_comm_overlap_cfg: str | None = flag(
        None, no_effect="it describes buffers of Transformer Engine; all layers cut their products in one way"
    )
    """File with settings for --tp-comm-overlap."""

    use_torch_fsdp2: bool = False
    """Shard weights, gradients and optimizer state over data parallel ranks. Another spelling of --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params."""

    enable_gloo_process_groups: bool = flag(True, off="--disable-gloo-process-groups", no_effect=_GLOO)
    """Create gloo groups in addition to the device's groups."""

    ddp_num_buckets: int | None = flag(None, no_effect="--ddp-bucket-size sets the size of buckets instead")
    """Number of gradient buckets."""

    megatron_fsdp_main_params_dtype: Literal["fp32", "bf16", "fp16", "auto"] = flag(
        "fp32", supported=["fp32", "fp16", "auto"], only_with="use_megatron_fsdp"
    )
    """With --use-megatron-fsdp: type of the main weights (auto: what --main-params-dtype says). fp16 is another
    spelling of --use-precision-aware-optimizer --main-params-dtype fp16. With --use-precision-aware-optimizer, main
    weights in float32 need only 2 bytes in addition to the bfloat16 weights."""

    megatron_fsdp_main_grads_dtype: Literal["fp32", "bf16", "fp16", "auto"] = flag(
        "auto", supported=["auto", "fp32", "bf16"], only_with="use_megatron_fsdp"
    )
    """With --use-megatron-fsdp: type in which gradients are accumulated (auto: fp32). bf16 requires a model in
    bfloat16; gradients are then reduced in bf16 too, unless --megatron-fsdp-grad-comm-dtype is fp32."""

    megatron_fsdp_grad_comm_dtype: Literal["fp32", "fp16", "bf16", "auto"] = flag(
        "auto", supported=["auto", "fp32", "bf16"], only_with="use_megatron_fsdp"
    )
    """With --use-megatron-fsdp: type of gradients during communication; auto: bf16 with --grad-reduce-in-bf16 or with
    main gradients in bf16, otherwise fp32."""

    grad_reduce_in_bf16: bool = flag(False, only_with="bf16", or_with="fp16")
    """Reduce gradients over ranks in the model's type. They are still accumulated in float32."""

    nccl_communicator_config_path: str | None = None
    """YAML file with settings of NCCL communicators by group: min_ctas, max_ctas, cga_cluster_size, net_name,
    is_high_priority_stream, such as "dp: {max_ctas: 8}". A group that covers the world gets a communicator of its own.
    Groups of the same ranks share one communicator. It has the settings of the group that comes first in the file."""

    high_priority_stream_groups: list[str] = flag(
        default_factory=list, nargs="*", no_effect="the priority of a stream follows from what runs on it"
    )
    """Groups whose communication runs on streams of high priority."""

    local_rank: int = flag(0, no_effect="torchrun sets the environment variable LOCAL_RANK")
    """Number of this process on its machine."""

    data_parallel_random_init: bool = flag(
        False, no_effect="replicas have equal weights from the start; Megatron-LM makes them equal by a broadcast"
    )
    """Initialize each data parallel replica with different weights. The first replica's weights are then sent to the
    others."""

    te_rng_tracker: bool = flag(
        False, no_effect="random numbers are functions of seed, step and position; there are no generator states"
    )
    """Use Transformer Engine's tracker of random states."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        timeouts = ("distributed_timeout_minutes", "distributed_timeout_seconds_after_init")
        yield from too_small(self, (*timeouts, *_CHUNKS, "planned_world_size"), 1)
