"""Settings of the reduction of gradients over data parallel ranks."""

from dataclasses import dataclass
from typing import Literal

import torch

from megatron.core.declarations.config_fields import flag, not_a_flag, refuse, unsupported_values

Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


_UNREGISTERED = "buffers are not registered with NCCL, which sends from copies of its own; the results are equal"


@dataclass
class DistributedDataParallelConfig:
    """Settings of `DistributedDataParallel`. Raises UserError for a value that is not supported yet."""

    grad_reduce_in_fp32: bool = flag(False, on="--accumulate-allreduce-grads-in-fp32")
    """Accumulate and reduce gradients in float32. Always on in training with --bf16 or --fp16, unless
    --grad-reduce-in-bf16 is given."""

    overlap_grad_reduce: bool = False
    """Reduce the gradients of a layer while backward computes the layers below."""

    overlap_param_gather: bool = not_a_flag(False)
    """All-gather updated weights while the next forward pass starts."""

    align_param_gather: bool = flag(
        False,
        off="--no-align-param-gather",
        off_help="Each pipeline stage starts its all-gathers of weights when it needs them.",
        no_effect="all pipeline stages gather their weights right after the update, which is at the same time",
    )
    """All pipeline stages start their all-gathers of weights at the same time."""

    use_distributed_optimizer: bool = not_a_flag(False)
    """Shard the optimizer's state over data parallel ranks."""

    num_distributed_optimizer_instances: int = flag(1, only_with="use_distributed_optimizer")
    """Number of replicas of the sharded optimizer state: data parallel ranks are divided into this many instances, and
    each instance shards the state over its ranks."""

    check_for_nan_in_grad: bool = not_a_flag(False)
    """Check for NaN and infinite gradients before they are reduced."""

    check_for_large_grads: bool = False
    """Print a line if the norm of the gradient is at least 10 times the largest of the first 100 iterations."""

    bucket_size: int | None = flag(None, on="--ddp-bucket-size")
    """Number of elements that are reduced together, rounded to whole layers. Default: chosen by the number of ranks."""

    pad_buckets_for_high_nccl_busbw: bool = flag(
        False,
        on="--ddp-pad-buckets-for-high-nccl-busbw",
        no_effect="the buffers of layers are aligned already; more padding would not make the bus faster here",
    )
    """Pad buckets to a multiple of a large power of two."""

    exact_gradient_sums: bool = flag(False, on="--exact-data-parallel-sums")
    """Sum gradients over micro-batches and data parallel ranks exactly, so that losses and weights are equal in every
    bit for any number of data parallel ranks and any sharding over them. A parameter takes 8 bytes more. Needs
    --deterministic-mode."""

    reduce_scatter_with_fp32_accumulation: bool = flag(
        False,
        on="--ddp-reduce-scatter-with-fp32-accumulation",
        only_with="grad_reduce_in_bf16",
    )
    """With --grad-reduce-in-bf16: send gradients in the model's type, but sum them in float32."""

    average_in_collective: bool = flag(False, on="--ddp-average-in-collective")
    """Let the collective average over ranks, instead of scaling gradients before it. NCCL averages without this flag
    where that gives the same bits."""

    fp8_param_gather: bool = flag(False, only_with="fp8")
    """With --fp8-format: keep the weights of fp8 layers only in fp8, and gather them in fp8 after the update. Saves 2
    bytes per weight, and half of the gathered bytes; the results are equal to the bit. Has no effect
    with layers of Transformer Engine."""

    reuse_grad_buf_for_mxfp8_param_ag: bool = not_a_flag(False)
    """Gather mxfp8 weights into the gradient buffer."""

    use_megatron_fsdp: bool = False
    """Shard the model over data parallel ranks as --data-parallel-sharding-strategy says."""

    use_custom_fsdp: bool = not_a_flag(False)
    """Former name of use_megatron_fsdp."""

    data_parallel_sharding_strategy: Sharding = flag("no_shard", only_with="use_megatron_fsdp")
    """With --use-megatron-fsdp: shard nothing (no_shard), optimizer state (optim), gradients too (optim_grads), or
    parameters too (optim_grads_params)."""

    param_nvme_offload_path: str | None = flag(None, only_with="data_parallel_sharding_strategy=optim_grads_params")
    """With --data-parallel-sharding-strategy optim_grads_params: keep the sharded weights in files of a folder on a
    local disk (NVMe). They are read before each use. Checkpoints do not need the files. Each run needs a folder of its
    own."""

    gradient_reduce_div_fusion: bool = flag(
        True,
        off="--no-gradient-reduce-div-fusion",
        no_effect="gradients are accumulated in packed buffers, so no kernel packs them",
    )
    """With --use-megatron-fsdp: divide gradients in the kernel that packs them."""

    suggested_communication_unit_size: int | None = flag(
        None, no_effect="shards are communicated layer by layer; --ddp-bucket-size joins layers"
    )
    """With --use-megatron-fsdp: number of elements to communicate at once."""

    preserve_fp32_weights: bool = not_a_flag(True)
    """With use_megatron_fsdp: keep main weights in float32."""

    keep_fp8_transpose_cache: bool = flag(
        False, no_effect="weights that are sharded between uses are quantised each time, others once a step"
    )
    """With --use-megatron-fsdp: keep transposed fp8 weights between micro-batches."""

    nccl_ub: bool = flag(False, on="--use-nccl-ub", no_effect=_UNREGISTERED)
    """Register communication buffers with NCCL, so that it reads them in place."""

    fsdp_double_buffer: bool = flag(False, no_effect="the weights of each layer are gathered into memory of its own")
    """With --use-megatron-fsdp: alternate between two buffers for gathered weights."""

    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = flag(
        "no_shard", no_effect="the state is sharded over the ranks of an optimizer instance, by default all of them"
    )
    """With --use-megatron-fsdp: what is sharded over the outer groups of data parallel ranks, which
    --num-distributed-optimizer-instances makes."""

    disable_symmetric_registration: bool = flag(False, only_with="nccl_ub")
    """With --use-nccl-ub: register buffers locally on each rank instead of symmetrically on all."""

    fsdp_manual_registration: bool = flag(False, only_with="nccl_ub")
    """With --use-nccl-ub: register the buffers of sharded parameters manually."""

    main_grads_dtype: torch.dtype = not_a_flag(torch.float32)
    """Type of the main gradients of bfloat16 parameters: float32, or bfloat16, as in OptimizerConfig."""

    delay_wgrad_compute: bool = not_a_flag(False)
    """Weight gradients are computed later than input gradients."""

    def __post_init__(self) -> None:
        refuse(unsupported_values(self), self)
