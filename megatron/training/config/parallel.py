"""Processes and what they exchange, beyond the sizes that ModelParallelConfig states."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_a_flag, not_yet

_PIPELINE = "pipeline_model_parallel_size"
_GLOO = "there is one small gloo group beside the device's, for the agreement to exit"


@dataclass(kw_only=True, frozen=True)
class ParallelConfig:
    """The grid of ranks around the model."""

    world_size: int = not_a_flag(1)
    """Processes of the run, from WORLD_SIZE."""

    data_parallel_size: int = not_a_flag(1)
    """Replicas of the model; follows from the others."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library: nccl between GPUs, gloo between CPUs; chosen by device when not given."""

    distributed_timeout_minutes: int = 10
    """How long a collective may wait for other ranks."""

    distributed_timeout_seconds_after_init: int | None = not_yet(None)
    """How long a collective may wait once training runs."""

    use_tp_pp_dp_mapping: bool = flag(False, only_with=_PIPELINE)
    """Number ranks with pipeline stages varying faster than data parallel replicas."""

    num_layers_per_virtual_pipeline_stage: int | None = flag(None, only_with=_PIPELINE)
    """Layers of each model chunk of the interleaved schedule."""

    num_virtual_stages_per_pipeline_rank: int | None = flag(None, only_with=_PIPELINE)
    """Model chunks that each pipeline stage holds."""

    tp_comm_overlap_cfg: str | None = flag(None, only_with="tp_comm_overlap")
    """File that tunes --tp-comm-overlap."""

    use_torch_fsdp2: bool = False
    """Shard weights, gradients and optimizer state over data parallel ranks: --use-megatron-fsdp with
    --data-parallel-sharding-strategy optim_grads_params."""

    enable_gloo_process_groups: bool = flag(True, off="--disable-gloo-process-groups", no_effect=_GLOO)
    """Make gloo groups beside the device's."""

    ddp_num_buckets: int | None = flag(None, no_effect="--ddp-bucket-size says how much is reduced together")
    """Parts in which gradients are reduced."""

    megatron_fsdp_main_params_dtype: Literal["fp32", "bf16", "fp16", "auto"] = flag(
        "fp32", supported=["fp32"], only_with="use_megatron_fsdp"
    )
    """With --use-megatron-fsdp: type of the main weights."""

    megatron_fsdp_main_grads_dtype: Literal["fp32", "bf16", "fp16", "auto"] = flag(
        "auto", supported=["auto", "fp32"], no_effect="gradients are accumulated in float32 at least, always"
    )
    """With --use-megatron-fsdp: type of the main gradients."""

    megatron_fsdp_grad_comm_dtype: Literal["fp32", "fp16", "bf16", "auto"] = flag(
        "auto", supported=["auto", "fp32", "bf16"], only_with="use_megatron_fsdp"
    )
    """With --use-megatron-fsdp: type in which gradients are sent; auto: as --grad-reduce-in-bf16 says."""

    grad_reduce_in_bf16: bool = False
    """Send gradients in the model's type when they are reduced; they are accumulated in float32 in any case."""

    nccl_communicator_config_path: str | None = not_yet(None)
    """File that tunes NCCL's communicators."""

    high_priority_stream_groups: list[str] = flag(
        default_factory=list, nargs="*", no_effect="streams are given their priorities by what runs on them"
    )
    """Groups whose communication runs on streams of high priority."""

    local_rank: int = flag(0, no_effect="torchrun's LOCAL_RANK says it")
    """Number of this process on its machine."""

    data_parallel_random_init: bool = not_yet(False)
    """Start data parallel replicas from different weights."""

    te_rng_tracker: bool = flag(False, no_effect="random numbers are functions of their place; there are no generators")
    """Generator states of Transformer Engine."""
