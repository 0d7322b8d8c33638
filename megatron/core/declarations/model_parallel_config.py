"""How a model is split over ranks, and how the ranks communicate.

`ModelParallelConfig` configures every parallel part of the library; `TransformerConfig` extends it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.core.declarations.config_fields import flag, not_a_flag, refuse, too_small, unsupported_values

_OLD_OVERLAP = "it belongs to old Transformer Engine releases"


NoSync = Callable[[], AbstractContextManager[object]]
"""Makes a context in which the gradients of a model chunk are not reduced."""


@dataclass
class ModelParallelConfig:
    """Sizes of the grid of ranks, number formats, and communication between ranks.

    Raises UserError for a value that is impossible or not supported yet.
    """

    # Model parallelism -----------------------------------------------------------------------------------------------

    tensor_model_parallel_size: int = 1
    """Number of ranks over which the matrices of each layer are split."""

    pipeline_model_parallel_comm_backend: Literal["nccl", "ucc"] | None = flag(
        None,
        supported=[None, "nccl"],
        no_effect="pipeline stages use the communication library of all other groups",
    )
    """Communication library between pipeline stages. Default: that of the other groups."""

    pipeline_model_parallel_size: int = 1
    """Number of ranks over which the layers are divided (pipeline stages)."""

    virtual_pipeline_model_parallel_size: int | None = not_a_flag(None)
    """Number of model chunks on each pipeline rank (interleaved schedule); None: one."""

    sequence_parallel: bool = flag(False, only_with="tensor_model_parallel_size")
    """Split norms, dropout and residuals over the tensor parallel ranks along the sequence."""

    context_parallel_size: int = 1
    """Number of ranks over which each sequence is split, in all layers including attention."""

    hierarchical_context_parallel_sizes: list[int] | None = flag(None, only_with="context_parallel_size")
    """Sizes of the levels of `--cp-comm-type a2a+p2p`; their product is the context parallel size."""

    max_seqlen_per_dp_cp_rank: int | None = flag(
        None, only_with="hybrid_context_parallel", aliases=["--max-seqlen-per-cp-rank"]
    )
    """With --hybrid-context-parallel: largest number of tokens of a micro-batch on one rank."""

    hybrid_context_parallel: bool = flag(False, aliases=["--dynamic-context-parallel"])
    """Split each document of a global batch over as few neighbouring data and context parallel ranks as have room for
    it (1, 2, 4, ...), so that ranks with short documents do not wait for ranks with long ones. Evaluation splits all
    rows over --context-parallel-size ranks, and only its micro-batches have --micro-batch-size rows."""

    expert_model_parallel_size: int = 1
    """Number of ranks over which the experts of a layer are divided."""

    expert_tensor_parallel_size: int | None = flag(None, only_with="num_moe_experts")
    """Number of ranks over which the matrices of each expert are split. Default: --tensor-model-parallel-size."""

    moe_extended_tp: bool = flag(False, no_effect="--expert-tensor-parallel-size has replaced it")
    """Flag of older releases: split experts over tensor parallel ranks too."""

    # Initial values --------------------------------------------------------------------------------------------------

    perform_initialization: bool = flag(
        True,
        off="--no-initialization",
        off_help="Do not draw initial weights. They have arbitrary values until a checkpoint is loaded.",
    )
    """Draw initial weights. Otherwise they have arbitrary values until a checkpoint is loaded."""

    use_cpu_initialization: bool = flag(False, no_effect="initial weights have the same values on every device")
    """Draw initial weights on the CPU."""

    # Number formats --------------------------------------------------------------------------------------------------

    fp16: bool = False
    """Compute in float16 with a loss scale; main weights and gradients are float32."""

    bf16: bool = False
    """Compute in bfloat16; main weights and gradients are float32."""

    params_dtype: torch.dtype = not_a_flag(torch.float32)
    """Type of the weights that layers compute with. Set by fp16, bf16 and fp64."""

    # Hooks of the training loop --------------------------------------------------------------------------------------

    timers: Callable[..., object] | None = not_a_flag(None)
    """Named timers (megatron.core.Timers)."""

    finalize_model_grads_func: Callable[..., object] | None = not_a_flag(None)
    """Called with (model chunks, number of tokens) after all micro-batches of a step."""

    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = not_a_flag(None)
    """Multiplies the loss by the loss scale."""

    no_sync_func: NoSync | list[NoSync] | None = not_a_flag(None)
    """Returns a context manager inside which gradients are accumulated without being reduced."""

    grad_sync_func: Callable[..., object] | None = not_a_flag(None)
    """Starts the reduction of the gradients of given parameters."""

    param_sync_func: Callable[..., object] | None = not_a_flag(None)
    """Starts the all-gather of given parameters."""

    # Arithmetic ------------------------------------------------------------------------------------------------------

    deterministic_mode: bool = False
    """Use only kernels whose results are equal in every run. Slower on a GPU."""

    enable_autocast: bool = not_a_flag(False)
    """Run the forward pass under torch.autocast."""

    autocast_dtype: torch.dtype | None = not_a_flag(None)
    """Type of the autocast; None: params_dtype."""

    num_microbatches_with_partial_activation_checkpoints: int | None = not_a_flag(None)
    """Number of micro-batches in flight for which only a part of the layers recomputes its activations."""

    # Fusions and tensor parallel overlap -----------------------------------------------------------------------------

    gradient_accumulation_fusion: bool = flag(
        False,
        off="--no-gradient-accumulation-fusion",
        no_effect="weight gradients are always accumulated by the matrix product itself, without an extra kernel",
    )
    """Accumulate weight gradients inside the matrix product."""

    async_tensor_model_parallel_allreduce: bool = flag(
        True,
        off="--no-async-tensor-model-parallel-allreduce",
        aliases=["--disable-async-tensor-model-parallel-allreduce"],
        no_effect="the overlap is always on",
    )
    """Reduce input gradients of a linear layer while its weight gradient is computed."""

    use_te_rng_tracker: bool = not_a_flag(False)
    """Use Transformer Engine's random number generator states. Has no effect: ours need no states."""

    tp_comm_overlap: bool = flag(False, off="--no-tp-comm-overlap", only_with="sequence_parallel")
    """Cut the matrix products of tensor parallel layers into pieces, one for each rank's tokens, so that gathers and
    sums over ranks overlap with products of other pieces. Needs memory for three gathered activations. Products in fp8
    are not cut. Default: on where two tensor parallel ranks with sequence parallelism have GPUs of one host and at
    least 2048 tokens each in a micro-batch."""

    tp_comm_bulk_wgrad: bool = flag(
        True,
        off="--disable-tp-comm-bulk-wgrad",
        aliases=["--no-tp-comm-bulk-wgrad"],
        no_effect="inputs are always gathered while input gradients are computed",
    )
    """With --tp-comm-overlap: all-gather inputs while input gradients are computed."""

    tp_comm_bulk_dgrad: bool = flag(
        True,
        off="--disable-tp-comm-bulk-dgrad",
        aliases=["--no-tp-comm-bulk-dgrad"],
        no_effect="input gradients are always summed while weight gradients are computed",
    )
    """With --tp-comm-overlap: reduce-scatter while weight gradients are computed."""

    tp_comm_overlap_ag: bool = flag(
        True, off="--disable-tp-comm-overlap-ag", aliases=["--no-tp-comm-overlap-ag"], only_with="tp_comm_overlap"
    )
    """With --tp-comm-overlap: cut products of gathered tokens. They are the outputs of column parallel layers and the
    input gradients of row parallel ones."""

    tp_comm_overlap_rs: bool = flag(
        True, off="--disable-tp-comm-overlap-rs", aliases=["--no-tp-comm-overlap-rs"], only_with="tp_comm_overlap"
    )
    """With --tp-comm-overlap: cut products whose result is summed over ranks. They are the outputs of row parallel
    layers."""

    tp_comm_overlap_rs_dgrad: bool = flag(False, only_with="tp_comm_overlap")
    """With --tp-comm-overlap: cut the input gradients of column parallel layers too. Otherwise their sum over ranks
    overlaps with the weight gradient only. On where --tp-comm-overlap is on by default."""

    tp_comm_split_ag: bool = flag(
        True, off="--disable-tp-comm-split-ag", aliases=["--no-tp-comm-split-ag"], no_effect=_OLD_OVERLAP
    )
    """Flag of older releases: split all-gathers into pieces."""

    tp_comm_atomic_ag: bool = not_a_flag(False)
    """Flag of older releases: all-gather with atomic kernels."""

    tp_comm_split_rs: bool = flag(
        True, off="--disable-tp-comm-split-rs", aliases=["--no-tp-comm-split-rs"], no_effect=_OLD_OVERLAP
    )
    """Flag of older releases: split reduce-scatters into pieces."""

    tp_comm_atomic_rs: bool = not_a_flag(False)
    """Flag of older releases: reduce-scatter with atomic kernels."""

    cross_entropy_loss_fusion: bool = flag(False, no_effect="cross entropy has one implementation, which is fused")
    """Compute the cross entropy in one kernel."""

    cross_entropy_fusion_impl: Literal["native", "te"] = flag(
        "native", no_effect="cross entropy has one implementation, which is fused"
    )
    """Implementation of the fused cross entropy."""

    tp_comm_overlap_disable_qkv: bool = not_a_flag(False)
    """With tp_comm_overlap: leave the QKV projection out. Has no effect."""

    tp_comm_overlap_disable_fc1: bool = not_a_flag(False)
    """With tp_comm_overlap: leave the first linear layer of the MLP out. Has no effect."""

    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] = flag(
        "nccl", no_effect="ranks find each other's memory through their process group"
    )
    """Library that sets up the overlapped tensor parallel communication."""

    overlap_moe_expert_parallel_comm: bool = flag(
        False,
        only_with="num_moe_experts",
        no_effect="micro-batches run one after the other, which was faster; --delay-wgrad-compute and "
        "--moe-shared-expert-overlap hide the exchange",
    )
    """Hide the communication of tokens between experts behind the computation of another micro-batch."""

    delay_wgrad_compute: bool = flag(False, off="--no-delay-wgrad-compute", only_with="num_moe_experts")
    """Compute the weight gradients of a backward while it waits for its own exchanges of tokens between experts.
    Results do not change."""

    ep_overlap_early_attn_memory_release: bool = flag(
        False, no_effect="backward frees each activation as soon as it is no longer needed"
    )
    """With --overlap-moe-expert-parallel-comm: free attention's activations early."""

    # Pipeline --------------------------------------------------------------------------------------------------------

    pipeline_schedule: Literal["1f1b", "interleaved", "zb-h1", "zb-v"] | None = flag(
        None, only_with="pipeline_model_parallel_size"
    )
    """Pipeline schedule: 1f1b; interleaved (several model chunks on each rank); zb-h1 (1f1b with weight gradients
    deferred into its bubbles); zb-v (zero bubble with two chunks on each rank, and the first and last stage on the
    first rank). Default: interleaved with virtual stages, else 1f1b."""

    pipeline_dtype: torch.dtype | None = not_a_flag(None)
    """Type of the messages between pipeline stages; None: params_dtype."""

    variable_seq_lengths: bool = not_a_flag(False)
    """Sequence lengths differ between micro-batches, and stages send them to each other."""

    overlap_p2p_comm: bool = flag(False, off="--no-overlap-p2p-communication", only_with="pipeline_model_parallel_size")
    """Overlap the communication between pipeline stages with computation."""

    batch_p2p_comm: bool = not_a_flag(True)
    """Post sends and receives of a stage as one batch."""

    batch_p2p_sync: bool = not_a_flag(True)
    """Synchronise the device after a batch of sends and receives."""

    use_ring_exchange_p2p: bool = flag(False, no_effect="it needs a build of torch with ring_exchange")
    """Send activations between pipeline stages with a kernel that only a special build of torch has."""

    deallocate_pipeline_outputs: bool = not_a_flag(False)
    """Free the output of a stage after it was sent to the next one."""

    defer_embedding_wgrad_compute: bool = flag(
        False, no_effect="--pipeline-schedule zb-h1 or zb-v defers the weight gradients of all layers"
    )
    """Defer the weight gradient of the output layer until the pipeline drains."""

    wgrad_deferral_limit: int = flag(0, only_with="defer_embedding_wgrad_compute")
    """With --defer-embedding-wgrad-compute: number of micro-batches for which it is deferred; 0: all."""

    overlap_p2p_comm_warmup_flush: bool = flag(
        False,
        on="--overlap-p2p-communication-warmup-flush",
        no_effect="communication between stages always overlaps, unless --no-overlap-p2p-communication is given",
    )
    """Overlap the communication between pipeline stages in warm-up and drain too."""

    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        on="--microbatch-group-size-per-virtual-pipeline-stage",
        only_with="pipeline_model_parallel_size",
    )
    """Number of micro-batches that a model chunk runs in a row. Default: --pipeline-model-parallel-size."""

    mtp_standalone: bool = flag(False, only_with="mtp_num_layers")
    """The multi-token prediction layers have their own pipeline stage. Refused unless --pipeline-model-parallel-layout
    has such a stage."""

    # Offloading of activations ---------------------------------------------------------------------------------------

    cpu_offloading: bool = not_a_flag(False)
    """Has no effect: `cpu_offloading_num_layers` selects the layers."""

    cpu_offloading_num_layers: int = 0
    """Number of layers, from the first of each model chunk, whose activations are kept in host memory from forward to
    backward; with full recomputation, only their inputs. Copies overlap with computation."""

    cpu_offloading_retain_pinned_cpu_buffers: bool = flag(
        False, no_effect="freed pinned host memory is always kept and used again"
    )
    """Use the host memory of one step again in the next."""

    _cpu_offloading_context: AbstractContextManager[object] | None = not_a_flag(None)
    """The context manager inside which activations are moved."""

    cpu_offloading_activations: bool = not_a_flag(True)
    """With cpu_offloading: move activations."""

    cpu_offloading_weights: bool = not_a_flag(False)
    """With cpu_offloading: move weights."""

    cpu_offloading_double_buffering: bool = not_a_flag(False)
    """With cpu_offloading: alternate between two buffers."""

    # Timing ----------------------------------------------------------------------------------------------------------

    barrier_with_L1_time: bool = flag(
        True,
        off="--no-barrier-with-level-1-timing",
        off_help="Put no barrier before timers of level 0 and 1. Their times then cannot be compared between ranks.",
    )
    """Put a barrier before timers of level 0 and 1, so that their times can be compared between ranks."""

    # Ours ------------------------------------------------------------------------------------------------------------

    seed: int = 1234
    """Seed of initial weights, dropout and data order. Must be larger than 0."""

    tp_comm_overlap_transport: Literal["symmetric-memory", "process-group"] | None = flag(
        None, only_with="tp_comm_overlap"
    )
    """With --tp-comm-overlap: how pieces are sent. symmetric-memory: copy engines write them into the memory of the
    other GPUs of the host; process-group: collectives of two ranks each, on any device and between hosts. Default:
    symmetric-memory on GPUs that share memory, otherwise process-group."""

    logit_dtype: Literal["bf16", "fp32"] | None = flag(None, on="--output-logit-dtype")
    """Number format of the logits, which the loss reads; the product accumulates in float32. Default: the model's
    format. With a 16-bit model, fp32 doubles the memory of the logits. Gradients of logits are rounded to the model's
    format before they are multiplied."""

    fp64: bool = False
    """Compute in float64, which is slow but exact enough to compare layouts. Only the cosines and sines of rotary
    positions are float32, as in other formats."""

    def __post_init__(self) -> None:
        refuse([*unsupported_values(self), *validate(self)], self)
        if self.tensor_model_parallel_size == 1:
            self.sequence_parallel = False
        chosen = {self.fp16: torch.float16, self.bf16: torch.bfloat16, self.fp64: torch.float64}.get(True)
        if chosen is not None:
            self.params_dtype = chosen
        if self.pipeline_dtype is None:
            self.pipeline_dtype = self.params_dtype


_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def validate(config: ModelParallelConfig) -> Iterator[str]:
    """Yields a problem for each impossible value. `config` has the fields of ModelParallelConfig."""
    formats = [f"{{{name}}}" for name in ("fp16", "bf16", "fp64") if getattr(config, name)]
    if len(formats) > 1:
        yield f"{' and '.join(formats)} are set together; choose one"
    if config.seed <= 0:
        yield "{seed} must be larger than 0"
    yield from too_small(config, (*_SIZES, "max_seqlen_per_dp_cp_rank"), 1)
    if config.hybrid_context_parallel and config.max_seqlen_per_dp_cp_rank is None:
        yield (
            "{hybrid_context_parallel:name} needs {max_seqlen_per_dp_cp_rank:name}, the tokens that a rank has memory "
            "for; the longest row divided by {context_parallel_size:name} is a good start"
        )
