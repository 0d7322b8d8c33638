"""Settings of the optimizer: learning rates, weight decay, moments, loss scale, clipping."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.core.declarations.config_fields import flag, not_a_flag, refuse, unsupported_values

_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
}


_OTHER_OPTIMIZERS = {
    "lion": "lion updates only what muon leaves: give --optimizer muon --muon-scalar-optimizer lion, or adam",
    "soap": "there is no such update; give muon, which preconditions matrices too",
    "adaptive_muon": "there is no such update; give muon",
}


def _words(*names: str) -> dict[str, torch.dtype]:
    return {name: _DTYPES[name] for name in names}


_MUON = "optimizer=muon|dist_muon"
_DYNAMIC_SCALE = ("fp16", "loss_scale=None")


@dataclass
class OptimizerConfig:
    """Settings of `get_megatron_optimizer`. Raises UserError for a value that is impossible or not supported yet."""

    # Learning rate and decay -----------------------------------------------------------------------------------------

    lr: float | None = None
    """Largest learning rate of the schedule."""

    min_lr: float | None = flag(None, only_with="lr_decay_style!=constant")
    """Learning rate at the end of the schedule."""

    decoupled_lr: float | None = None
    """Largest learning rate of the embedding and the output layer. Default: --lr."""

    decoupled_min_lr: float | None = flag(None, only_with=("decoupled_lr", "lr_decay_style!=constant"))
    """Learning rate of the embedding and the output layer at the end of the schedule."""

    weight_decay: float = 0.01
    """Weight decay of matrices. Biases and norm weights have none."""

    mup_width_mult: float = not_a_flag(1.0)
    """With muP: width of the model divided by the base width, as in TransformerConfig. Adam divides the rate of the
    matrices of layers by it; SGD multiplies all other rates by it."""

    apply_wd_to_qk_layernorm: bool = flag(False, only_with="qk_layernorm")
    """Apply weight decay to the norms of queries and keys (--qk-layernorm) too."""

    # Number formats --------------------------------------------------------------------------------------------------

    fp8_recipe: str | None = not_a_flag(None)
    """Scaling recipe of fp8 weights, as in TransformerConfig."""

    fp16: bool = not_a_flag(False)
    """The model computes in float16, with a loss scale."""

    bf16: bool = not_a_flag(False)
    """The model computes in bfloat16."""

    reuse_grad_buf_for_mxfp8_param_ag: bool = flag(
        False, no_effect="weights in mxfp8 are gathered in the model's type, into their own buffer"
    )
    """Gather mxfp8 weights into the gradient buffer."""

    params_dtype: torch.dtype = not_a_flag(torch.float32)
    """Type of the weights that the model computes with."""

    use_precision_aware_optimizer: bool = False
    """Keep main weights and moments of AdamW in fewer bytes. Computes in float32; float32 main weights of a bfloat16
    model are kept as the 16 bits that the model's weights lack, without loss."""

    store_param_remainders: bool = not_a_flag(True)
    """With the precision-aware optimizer: keep only the low half of float32 main weights beside bfloat16 ones."""

    main_grads_dtype: torch.dtype = flag(
        torch.float32,
        words=_words("fp32", "bf16"),
        only_with="use_precision_aware_optimizer",
    )
    """With --use-precision-aware-optimizer: type in which gradients are accumulated over micro-batches and reduced over
    ranks. bf16 halves their memory but loses small contributions, so use few micro-batches."""

    main_params_dtype: torch.dtype = flag(
        torch.float32, words=_words("fp32", "fp16"), only_with="use_precision_aware_optimizer"
    )
    """With --use-precision-aware-optimizer: type of the main weights of a bfloat16 or float16 model. fp16 has a scale
    for each 64 neighbouring weights."""

    exp_avg_dtype: torch.dtype = flag(torch.float32, words=_DTYPES, only_with="use_precision_aware_optimizer")
    """With --use-precision-aware-optimizer: type of the first moment. fp16 and fp8 (e4m3) have a scale for each 64
    neighbouring numbers of a rank's part of a tensor, which depends on tensor parallelism."""

    exp_avg_sq_dtype: torch.dtype = flag(torch.float32, words=_DTYPES, only_with="use_precision_aware_optimizer")
    """With --use-precision-aware-optimizer: type of the second moment. fp16 and fp8 (e4m3) have scales like the first
    moment, and store its square root. Rounding stops a slow decay: use --adam-beta2 below 0.996 for bf16 and below 0.87
    for fp8."""

    # The update ------------------------------------------------------------------------------------------------------

    optimizer: Literal["adam", "sgd", "muon", "dist_muon"] = flag("adam", hints=_OTHER_OPTIMIZERS)
    """Update rule. adam is AdamW: weight decay acts on the weights, not on the gradient. muon orthogonalises the
    updates of matrices inside layers, and updates the rest as adam. dist_muon also shards the optimizer's state, as
    --use-distributed-optimizer does."""

    loss_scale: float | None = flag(None, only_with="fp16")
    """With --fp16: constant factor of the loss. Default: a dynamic loss scale."""

    initial_loss_scale: float = flag(4294967296, only_with=_DYNAMIC_SCALE)
    """With --fp16: initial value of the dynamic loss scale."""

    min_loss_scale: float = flag(1.0, only_with=_DYNAMIC_SCALE)
    """With --fp16: smallest value of the dynamic loss scale."""

    loss_scale_window: float = flag(1000, only_with=_DYNAMIC_SCALE)
    """With --fp16: number of steps without overflow after which the dynamic loss scale is doubled."""

    hysteresis: int = flag(2, only_with=_DYNAMIC_SCALE)
    """With --fp16: number of overflows before the dynamic loss scale is halved."""

    adam_beta1: float = flag(0.9, only_with="optimizer=adam", or_with="muon_scalar_optimizer=adam")
    """Adam: decay rate of the running mean of gradients."""

    adam_beta2: float = flag(0.999, only_with="optimizer=adam", or_with="muon_scalar_optimizer=adam")
    """Adam: decay rate of the running mean of squared gradients."""

    adam_eps: float = flag(1e-08, only_with="optimizer=adam", or_with="muon_scalar_optimizer=adam")
    """Adam: number added to the denominator of the update."""

    decoupled_weight_decay: bool = not_a_flag(True)
    """True: AdamW. False: weight decay is added to the gradient (Adam with L2 regularisation)."""

    sgd_momentum: float = flag(0.9, only_with="optimizer=sgd")
    """Momentum of SGD."""

    # Muon ------------------------------------------------------------------------------------------------------------

    muon_momentum: float = flag(0.95, only_with=_MUON)
    """Momentum of Muon."""

    muon_split_qkv: bool = flag(True, off="--muon-no-split-qkv", only_with=_MUON)
    """Muon: orthogonalise the matrices of queries, keys and values separately."""

    muon_use_nesterov: bool = flag(False, aliases=["--muon-nesterov"], only_with=_MUON)
    """Muon: use Nesterov momentum."""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag("spectral", only_with=_MUON)
    """Muon: factor of the update of a matrix with n outputs and m inputs: sqrt(max(n, m)) (spectral), sqrt(n / m)
    (unit_rms_norm) or sqrt(max(1, n / m)) (shape_scaling)."""

    muon_fp32_matmul_prec: Literal["low", "medium", "high"] = flag("medium", only_with=_MUON)
    """Muon: precision of the Newton-Schulz iteration. low: all in bfloat16; medium: factors of products are rounded to
    bfloat16; high: float32. On GPUs low and medium are one iteration with factors in float16."""

    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "aol"] = flag(
        "quintic", supported=["simple", "quintic", "polar_express"], only_with=_MUON
    )
    """Muon: polynomials of the Newton-Schulz iteration: one for all steps (simple), one for each of five steps
    (quintic), or the polynomials of Polar Express (polar_express)."""

    muon_num_ns_steps: int = flag(5, only_with=_MUON)
    """Muon: number of steps of the Newton-Schulz iteration."""

    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = flag("distributed", only_with=_MUON)
    """Muon: how a matrix that tensor parallel ranks divide is orthogonalised. distributed: one rank computes the whole
    matrix; duplicated: each rank computes the whole matrix; blockwise, Megatron-LM's default: each rank computes its
    own part, so the result depends on the layout."""

    muon_extra_scale_factor: float = flag(1.0, only_with=_MUON)
    """Muon: additional factor of the update. 0.2 with --muon-scale-mode spectral gives updates of AdamW's size."""

    muon_scalar_optimizer: Literal["adam", "lion"] = flag("adam", only_with=_MUON)
    """Muon: update rule of embeddings, output layer, norms and biases. adam is AdamW; lion needs one moment instead of
    two, and a smaller learning rate."""

    lion_beta1: float = flag(0.95, only_with="muon_scalar_optimizer=lion")
    """Lion: weight of the running mean of gradients in the direction of an update."""

    lion_beta2: float = flag(0.98, only_with="muon_scalar_optimizer=lion")
    """Lion: decay rate of the running mean of gradients."""

    muon_use_syrk: bool = flag(
        False,
        only_with=_MUON,
        no_effect="a product with its own transpose is computed like any other product, with the same result",
    )
    """Muon: compute one half of the symmetric products."""

    # Where the state is ----------------------------------------------------------------------------------------------

    use_distributed_optimizer: bool = False
    """Shard the optimizer's state over data parallel ranks (ZeRO-1): each rank updates its shard of the weights."""

    overlap_param_gather: bool = flag(False, only_with="use_distributed_optimizer")
    """All-gather updated weights while the next forward pass starts."""

    overlap_param_gather_with_optimizer_step: bool = flag(
        False,
        no_effect="the update is one pass over this rank's shard; weights are gathered layer by layer after it",
    )
    """All-gather updated weights while other weights are still being updated."""

    ema_decay: float | None = None
    """Decay of a moving average of the weights, such as 0.999: sharded like the optimizer's state, saved, and evaluated
    beside the weights. It needs the memory of main weights. tools/checkpoint/convert.py export --ema exports it."""

    optimizer_cpu_offload: bool = False
    """Keep main weights and moments in host memory. The update copies them to the device and back, piece by piece,
    while other pieces are updated. It sends 24 bytes per weight over PCIe, half in each direction."""

    optimizer_offload_fraction: float = flag(0.0, only_with="optimizer_cpu_offload")
    """With --optimizer-cpu-offload: fraction of the state that is in host memory, by whole layers."""

    optimizer_nvme_offload_path: str | None = flag(None, only_with="optimizer_cpu_offload")
    """With --optimizer-cpu-offload: keep this state in files of a folder on a local disk (NVMe), not in host memory.
    Every update reads and writes them piece by piece. Checkpoints do not need the files. Each run needs a folder of its
    own."""

    use_torch_optimizer_for_cpu_offload: bool = flag(
        False,
        only_with="optimizer_cpu_offload",
        no_effect="state in host memory is updated on the device, by the kernels that update all other state",
    )
    """With --optimizer-cpu-offload: update with torch's optimizer."""

    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False,
        only_with="optimizer_cpu_offload",
        no_effect="copies in both directions always overlap with the update",
    )
    """With --optimizer-cpu-offload: overlap copies between device and host with the update."""

    pin_cpu_grads: bool = flag(
        True,
        off="--no-pin-cpu-grads",
        only_with="optimizer_cpu_offload",
        no_effect="gradients stay on the device, where the update is computed",
    )
    """With --optimizer-cpu-offload: keep gradients in page-locked host memory."""

    pin_cpu_params: bool = flag(
        True,
        off="--no-pin-cpu-params",
        off_help="With --optimizer-cpu-offload: do not page-lock the state in host memory. Each copy then waits.",
        only_with="optimizer_cpu_offload",
    )
    """With --optimizer-cpu-offload: page-lock the host memory of the state. Without it each copy waits for the
    device."""

    # Clipping and statistics -----------------------------------------------------------------------------------------

    clip_grad: float = 1.0
    """Largest 2-norm of the gradient; a larger gradient is scaled down to it. 0 turns clipping off."""

    log_num_zeros_in_grad: bool = False
    """Count and log the zeros of the gradient."""

    barrier_with_L1_time: bool = not_a_flag(False)
    """Put barriers before timers of level 1, as in ModelParallelConfig."""

    timers: Callable[..., object] | None = not_a_flag(None)
    """Named timers (megatron.core.Timers)."""

    config_logger_dir: str = not_a_flag("")
    """Folder for a dump of this config, as in TransformerConfig."""

    def __post_init__(self) -> None:
        refuse([*unsupported_values(self), *validate(self)], self)


def validate(config: OptimizerConfig) -> Iterator[str]:
    """Yields a problem for each impossible value. `config` has the fields of OptimizerConfig."""
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum", "lion_beta1", "lion_beta2"):
        if not 0.0 <= getattr(config, name) < 1.0:
            yield f"{{{name}}} must be at least 0 and less than 1"
    for name in ("lr", "min_lr", "weight_decay"):
        value = getattr(config, name)
        if value is not None and not value >= 0:
            yield f"{{{name}}} must be at least 0"
    if config.lr is not None and config.min_lr is not None and 0 <= config.lr < config.min_lr:
        yield "{min_lr} is larger than {lr}"
    if not config.adam_eps > 0:
        yield "{adam_eps} must be larger than 0"
    if not config.clip_grad >= 0:
        yield "{clip_grad} must be at least 0; 0 turns clipping off"
    if config.optimizer in ("muon", "dist_muon") and config.mup_width_mult != 1.0:
        yield "{mup_width_mult} changes learning rates of adam and sgd; not yet those of {optimizer}"
    if not config.muon_num_ns_steps > 0:
        yield "{muon_num_ns_steps} must be larger than 0"
    if not 0.0 <= config.optimizer_offload_fraction <= 1.0:
        yield "{optimizer_offload_fraction} must be from 0 to 1"
    if config.ema_decay is not None and not 0.0 < config.ema_decay < 1.0:
        yield "{ema_decay} must be larger than 0 and less than 1"
    if config.ema_decay is not None and config.optimizer_cpu_offload:
        yield "{ema_decay}: the average stays on the device, beside its weights; leave out {optimizer_cpu_offload:name}"
    if config.optimizer_cpu_offload and config.optimizer in ("muon", "dist_muon"):
        yield (
            "{optimizer_cpu_offload}: {optimizer} orthogonalises whole matrices, whose momentum stays on the device; "
            "the state of adam, lion and sgd can move"
        )
    if config.use_precision_aware_optimizer:
        if config.optimizer != "adam":
            yield "{use_precision_aware_optimizer} needs {optimizer:name} adam"
        if config.main_params_dtype is not torch.float32 and not (config.bf16 or config.fp16):
            yield "{main_params_dtype}: a model in float32 has no main weights; add {bf16} or leave it at fp32"
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            yield f"{{{name}}} must be larger than 0"
