"""What the optimizer is told: rates, decay, moments, loss scale, clipping."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.core.config_fields import flag, not_a_flag, not_yet, refuse, unsupported_values

_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
}


def _words(*names: str) -> dict[str, torch.dtype]:
    return {name: _DTYPES[name] for name in names}


@dataclass
class OptimizerConfig:
    """Settings of `get_megatron_optimizer`. Raises UserError when a value is impossible or still to come."""

    # Learning rate and decay -----------------------------------------------------------------------------------------

    lr: float | None = None
    """Learning rate at the top of the schedule."""

    min_lr: float | None = None
    """Learning rate at the end of the schedule."""

    decoupled_lr: float | None = None
    """Learning rate of the embedding and the output layer, where it is not --lr."""

    decoupled_min_lr: float | None = flag(None, only_with="decoupled_lr")
    """Learning rate of the embedding and the output layer at the end of the schedule."""

    weight_decay: float = 0.01
    """Weight decay of matrices; biases and norm weights do not decay."""

    apply_wd_to_qk_layernorm: bool = False
    """Let the norms of queries and keys (--qk-layernorm) decay too."""

    # Number formats --------------------------------------------------------------------------------------------------

    fp8_recipe: str | None = not_a_flag(None)
    """Scaling recipe of fp8 weights, as in TransformerConfig."""

    fp16: bool = not_a_flag(False)
    """The model computes in float16: scale the loss."""

    bf16: bool = not_a_flag(False)
    """The model computes in bfloat16."""

    reuse_grad_buf_for_mxfp8_param_ag: bool = not_yet(False)
    """Gather mxfp8 weights into the gradient buffer."""

    params_dtype: torch.dtype = not_a_flag(torch.float32)
    """Type of the weights that the model computes with."""

    use_precision_aware_optimizer: bool = not_yet(False)
    """Keep main weights, gradients or moments in narrower formats."""

    store_param_remainders: bool = not_a_flag(True)
    """With the precision-aware optimizer: keep only the low half of float32 main weights beside bfloat16 ones."""

    main_grads_dtype: torch.dtype = flag(
        torch.float32, words=_words("fp32", "bf16"), only_with="use_precision_aware_optimizer"
    )
    """With --use-precision-aware-optimizer: type of the main gradients."""

    main_params_dtype: torch.dtype = flag(
        torch.float32, words=_words("fp32", "fp16"), only_with="use_precision_aware_optimizer"
    )
    """With --use-precision-aware-optimizer: type of the main weights."""

    exp_avg_dtype: torch.dtype = flag(torch.float32, words=_DTYPES, only_with="use_precision_aware_optimizer")
    """With --use-precision-aware-optimizer: type of the first moment."""

    exp_avg_sq_dtype: torch.dtype = flag(torch.float32, words=_DTYPES, only_with="use_precision_aware_optimizer")
    """With --use-precision-aware-optimizer: type of the second moment."""

    # The update ------------------------------------------------------------------------------------------------------

    optimizer: Literal["adam", "sgd", "muon", "dist_muon"] = flag("adam", supported=["adam", "sgd"])
    """Rule of the update. adam is AdamW: the decay acts on the weights, not on the gradient."""

    loss_scale: float | None = None
    """With --fp16: multiply the loss by this constant; a dynamic scale when not given."""

    initial_loss_scale: float = flag(4294967296, only_with="fp16")
    """With --fp16: dynamic loss scale at the start."""

    min_loss_scale: float = flag(1.0, only_with="fp16")
    """With --fp16: the dynamic loss scale does not fall below this."""

    loss_scale_window: float = flag(1000, only_with="fp16")
    """With --fp16: steps without overflow after which the scale is doubled."""

    hysteresis: int = flag(2, only_with="fp16")
    """With --fp16: overflows before the scale is halved."""

    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients."""

    adam_beta2: float = 0.999
    """Decay of Adam's mean of squared gradients."""

    adam_eps: float = 1e-08
    """Added to the denominator of Adam's update."""

    decoupled_weight_decay: bool = not_a_flag(True)
    """AdamW; False: the decay is added to the gradient (Adam with L2)."""

    sgd_momentum: float = 0.9
    """Momentum of SGD."""

    # Muon ------------------------------------------------------------------------------------------------------------

    muon_momentum: float = flag(0.95, only_with="optimizer=muon")
    """Momentum of Muon."""

    muon_split_qkv: bool = flag(True, off="--muon-no-split-qkv", only_with="optimizer=muon")
    """Orthogonalise queries, keys and values apart."""

    muon_use_nesterov: bool = flag(False, only_with="optimizer=muon")
    """Nesterov momentum in Muon."""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag(
        "spectral", only_with="optimizer=muon"
    )
    """How the size of Muon's update follows from the matrix's shape."""

    muon_fp32_matmul_prec: Literal["low", "medium", "high"] = flag("medium", only_with="optimizer=muon")
    """Precision of the products in the Newton-Schulz iteration."""

    muon_num_ns_steps: int = flag(5, only_with="optimizer=muon")
    """Steps of the Newton-Schulz iteration."""

    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = flag("blockwise", only_with="optimizer=muon")
    """What Muon orthogonalises of a matrix that tensor parallel ranks share."""

    muon_extra_scale_factor: float = flag(1.0, only_with="optimizer=muon")
    """Another factor of Muon's update."""

    # Where the state is ----------------------------------------------------------------------------------------------

    use_distributed_optimizer: bool = False
    """Spread the optimizer's state over data parallel ranks (ZeRO 1): each updates a part of the weights."""

    overlap_param_gather: bool = flag(False, only_with="use_distributed_optimizer")
    """Gather updated weights while the next forward pass begins."""

    overlap_param_gather_with_optimizer_step: bool = flag(
        False,
        no_effect="the update is one pass over this rank's part; its weights are gathered layer by layer after it",
    )
    """Gather updated weights while others are still being updated."""

    optimizer_cpu_offload: bool = not_yet(False)
    """Keep and update the optimizer's state in host memory."""

    optimizer_offload_fraction: float = flag(0.0, only_with="optimizer_cpu_offload")
    """With --optimizer-cpu-offload: part of the state that is moved."""

    use_torch_optimizer_for_cpu_offload: bool = flag(False, only_with="optimizer_cpu_offload")
    """With --optimizer-cpu-offload: update with torch's optimizer."""

    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, only_with="optimizer_cpu_offload")
    """With --optimizer-cpu-offload: overlap transfers with the update."""

    pin_cpu_grads: bool = flag(True, off="--no-pin-cpu-grads", only_with="optimizer_cpu_offload")
    """With --optimizer-cpu-offload: pin gradients in host memory."""

    pin_cpu_params: bool = flag(True, off="--no-pin-cpu-params", only_with="optimizer_cpu_offload")
    """With --optimizer-cpu-offload: pin weights in host memory."""

    # Clipping and statistics -----------------------------------------------------------------------------------------

    clip_grad: float = 1.0
    """Scale the gradient down to this 2-norm when it is longer; 0: leave it."""

    log_num_zeros_in_grad: bool = False
    """Count and log the zeros in the gradient."""

    barrier_with_L1_time: bool = not_a_flag(False)
    """Barriers before timers of level 1, as in ModelParallelConfig."""

    timers: Callable[..., Any] | None = not_a_flag(None)
    """Named timers (megatron.core.Timers)."""

    config_logger_dir: str = not_a_flag("")
    """Folder for a dump of this config, as in TransformerConfig."""

    def __post_init__(self) -> None:
        refuse([*unsupported_values(self), *optimizer_problems(self)], self)


def optimizer_problems(config: Any) -> Iterator[str]:
    """A problem for each value that no optimizer can work with; `config` has the fields of OptimizerConfig."""
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
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
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            yield f"{{{name}}} must be larger than 0"
