"""How gradients are reduced over data parallel ranks."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_a_flag, not_yet, refuse, unsupported_values

Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass
class DistributedDataParallelConfig:
    """Settings of `DistributedDataParallel`. Raises UserError for a value whose feature is still to come."""

    grad_reduce_in_fp32: bool = flag(False, on="--accumulate-allreduce-grads-in-fp32")
    """Accumulate and reduce gradients in float32. The training app always does with bf16 and fp16."""

    overlap_grad_reduce: bool = False
    """Reduce gradients of a layer while backward goes on with the layers below."""

    overlap_param_gather: bool = not_a_flag(False)
    """Gather updated weights while the next forward pass begins."""

    align_param_gather: bool = flag(
        False,
        off="--no-align-param-gather",
        no_effect="pipeline stages gather their weights once they are updated, which is at the same time on all",
    )
    """All pipeline stages start their gathers of weights together."""

    use_distributed_optimizer: bool = not_a_flag(False)
    """Spread the optimizer's state over data parallel ranks."""

    num_distributed_optimizer_instances: int = flag(1, only_with="use_distributed_optimizer")
    """Copies of the sharded optimizer state among data parallel ranks: each is spread over a part of them."""

    check_for_nan_in_grad: bool = not_a_flag(False)
    """Look for non-finite gradients before they are reduced."""

    check_for_large_grads: bool = not_yet(False)
    """Look for unexpectedly large gradients before they are reduced."""

    bucket_size: int | None = flag(None, on="--ddp-bucket-size")
    """Elements that are reduced together, in whole layers; as many as suit the number of ranks when not given."""

    pad_buckets_for_high_nccl_busbw: bool = flag(
        False,
        on="--ddp-pad-buckets-for-high-nccl-busbw",
        no_effect="a layer's buffer is aligned already; more padding would change no bus speed here",
    )
    """Pad what is reduced to a large power of two."""

    reduce_scatter_with_fp32_accumulation: bool = flag(
        False,
        on="--ddp-reduce-scatter-with-fp32-accumulation",
        only_with="grad_reduce_in_bf16",
    )
    """With --grad-reduce-in-bf16: send gradients in the model's type and sum them in float32."""

    average_in_collective: bool = flag(False, on="--ddp-average-in-collective")
    """Let the collective divide by the number of ranks, instead of scaling gradients before it."""

    fp8_param_gather: bool = not_yet(False)
    """Keep weights in fp8 and gather them so."""

    reuse_grad_buf_for_mxfp8_param_ag: bool = not_a_flag(False)
    """Gather mxfp8 weights into the gradient buffer."""

    use_megatron_fsdp: bool = False
    """Shard what --data-parallel-sharding-strategy says over data parallel ranks."""

    use_custom_fsdp: bool = not_a_flag(False)
    """Former name of use_megatron_fsdp."""

    data_parallel_sharding_strategy: Sharding = flag("no_shard", only_with="use_megatron_fsdp")
    """With --use-megatron-fsdp: what is sharded."""

    gradient_reduce_div_fusion: bool = flag(
        True,
        off="--no-gradient-reduce-div-fusion",
        no_effect="gradients lie packed from the start, so there is no kernel that packs them",
    )
    """With --use-megatron-fsdp: divide gradients in the kernel that packs them."""

    suggested_communication_unit_size: int | None = flag(
        None, no_effect="what is sharded comes and goes a layer at a time; --ddp-bucket-size joins layers"
    )
    """With --use-megatron-fsdp: elements to communicate at once."""

    preserve_fp32_weights: bool = not_a_flag(True)
    """With use_megatron_fsdp: keep float32 main weights."""

    keep_fp8_transpose_cache: bool = flag(False, only_with="fp8")
    """With --use-megatron-fsdp: keep transposed fp8 weights between micro-batches."""

    nccl_ub: bool = not_yet(False, on="--use-nccl-ub")
    """Register communication buffers with NCCL, so that it reads them in place."""

    fsdp_double_buffer: bool = flag(False, no_effect="the weights of each layer are gathered into memory of its own")
    """With --use-megatron-fsdp: use two buffers in turn for gathered weights."""

    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = flag(
        "no_shard", supported=["no_shard"], only_with="use_megatron_fsdp"
    )
    """With --use-megatron-fsdp: what is sharded over groups of data parallel ranks."""

    disable_symmetric_registration: bool = flag(False, only_with="nccl_ub")
    """With --use-nccl-ub: register buffers on each rank apart."""

    fsdp_manual_registration: bool = flag(False, only_with="nccl_ub")
    """With --use-nccl-ub: register the buffers of full sharding by hand."""

    delay_wgrad_compute: bool = not_a_flag(False)
    """Weight gradients come later than input gradients."""

    def __post_init__(self) -> None:
        refuse(unsupported_values(self), self)
