"""Sizes of the model and the parts of a layer."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megatron.core.declarations.config_fields import flag, not_a_flag, too_small
from megatron.core.declarations.flag_grammars import MOST_LAYERS

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(kw_only=True)
class ArchitectureConfig:
    """Layers, widths, norms, MLP, dropout, residual stream."""

    num_layers: int = 0
    """Transformer layers of the whole model."""

    hidden_size: int = 0
    """Width of the residual stream."""

    num_attention_heads: int = 0
    """Query heads of a layer."""

    ffn_hidden_size: int | None = None
    """Inner width of the MLP. Default: 4 * hidden size; with --swiglu 8/3 * hidden size, rounded down to a multiple of
    64."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Norm before attention, before the MLP and after the last layer."""

    layernorm_epsilon: float = flag(1e-05, on="--norm-epsilon")
    """Added to the variance in every norm."""

    layernorm_zero_centered_gamma: bool = flag(False, on="--apply-layernorm-1p")
    """Store norm weights minus one, so that they are initialized to zero."""

    norm_placement: Literal["pre", "post", "post_residual", "sandwich", "parallel", "parallel_two_norms"] = "pre"
    """Position of the norms in a layer: before attention and MLP (pre), after them (post), after their outputs are
    added to the residual stream (post_residual, as in the first Transformer and BERT; the last layer then ends with a
    norm, and the model has no further one), before and after (sandwich), or before with attention and MLP side by side,
    sharing one norm (parallel) or with one each (parallel_two_norms)."""

    first_input_norm: bool = flag(
        True, off="--no-first-input-norm", off_help="Build the first layer without a norm before attention."
    )
    """The first layer has a norm before attention. ModernBERT has none there, behind the norm of the embedding."""

    embedding_norm: bool = False
    """Norm the embedding's output before dropout, as the first BERT did."""

    norm_affine: bool = flag(True, off="--no-norm-affine", off_help="Build norms without weights.")
    """Norms have weights."""

    norm_bias: bool = flag(
        True, off="--no-norm-bias", off_help="Build LayerNorm without a bias.", only_with="normalization=LayerNorm"
    )
    """LayerNorm has a bias besides its weights."""

    add_bias_linear: bool = flag(
        True, off="--disable-bias-linear", off_help="Build the linear layers of attention and MLP without biases."
    )
    """Linear layers of attention and MLP have a bias."""

    attention_output_bias: bool | None = flag(None, on="--attention-output-bias", off="--no-attention-output-bias")
    """Give the output projection of attention a bias, or not; without the flag, --disable-bias-linear decides."""

    mlp_bias: bool | None = flag(None, on="--mlp-bias", off="--no-mlp-bias")
    """Give both linear layers of the MLP a bias, or not; without the flag, --disable-bias-linear decides."""

    gated_linear_unit: bool = not_a_flag(False)
    """The MLP multiplies its activation by a second product (gate and up); --swiglu sets it."""

    activation_func: Callable[[Tensor], Tensor] = not_a_flag(torch.nn.functional.gelu)
    """Activation of the MLP (of the gate half of a gated MLP)."""

    activation_func_fp8_input_store: bool = not_a_flag(False)
    """Keep the activation's input in fp8 for backward."""

    glu_linear_offset: float = 0.0
    """Added to the up half of a gated MLP."""

    activation_func_clamp_value: float | None = None
    """Clamp the gate half and the up half of a gated MLP to this bound."""

    use_te_activation_func: bool = flag(False, no_effect="activations are chosen with their backend")
    """Use the activation functions of Transformer Engine."""

    hidden_dropout: float = 0.1
    """Dropout probability after embedding, attention and MLP."""

    fp32_residual_connection: bool = flag(False, only_with="bf16", or_with=("fp16", "fp64"))
    """Keep the residual stream in float32."""

    apply_residual_connection_post_layernorm: bool = False
    """Add attention and MLP to the normed hidden states instead of their input, as the first BERT did."""

    embedding_multiplier: float = 1.0
    """Factor of the embedding's output. It is rounded to the type of the embedding's weights, as in the models that use
    it."""

    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""

    logit_scale: float = 1.0
    """Factor of the logits."""

    final_logit_softcapping: float | None = None
    """Soft bound c of the logits: c tanh(logits / c)."""

    normalize_output_weight: bool = False
    """Divide each row of the output layer's weight by its length before the product (Baichuan 2's NormHead)."""

    output_layer_bias: bool = flag(False, families=["gpt"])
    """Give the output layer a bias (that of a BERT always has one)."""

    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of the global batch, instead of averaging each micro-batch first."""

    mtp_num_layers: int | None = None
    """Number of multi-token prediction layers; each predicts one token further ahead."""

    mtp_loss_scaling_factor: float | None = flag(0.1, only_with="mtp_num_layers")
    """Weight of the multi-token prediction loss."""

    mtp_use_repeated_layer: bool = flag(False, only_with="mtp_num_layers")
    """Use one multi-token prediction layer for all --mtp-num-layers depths, which then share its weights."""

    mtp_detach_heads: bool = flag(False, only_with="mtp_num_layers")
    """Losses of multi-token prediction train its layers only: decoder, embedding and head get no gradient from them."""


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each impossible value of `ArchitectureConfig`; `config` has the fields of
    TransformerConfig."""
    yield from too_small(config, ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"), 1)
    if (config.num_layers or 0) > MOST_LAYERS:
        yield f"{{num_layers}} must be at most {MOST_LAYERS}"
    yield from too_small(config, ("layernorm_epsilon",), 0)
    if not 0.0 <= config.hidden_dropout < 1.0:
        yield "{hidden_dropout} must be at least 0 and less than 1"
    for name in ("embedding_multiplier", "residual_multiplier", "logit_scale"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) != 0.0):
            yield f"{{{name}}} must be a number other than 0"
    if config.final_logit_softcapping is not None and not 0.0 < config.final_logit_softcapping < math.inf:
        yield "{final_logit_softcapping} must be larger than 0, or left out"
    yield from _norm_problems(config)
    if (config.mtp_num_layers or 0) < 0:
        yield "{mtp_num_layers} must be at least 0"
    if config.mtp_loss_scaling_factor is None or config.mtp_loss_scaling_factor < 0:
        yield "{mtp_loss_scaling_factor} must be at least 0"


def _norm_problems(config: "TransformerConfig") -> Iterator[str]:
    if not config.norm_affine and config.layernorm_zero_centered_gamma:
        yield "{layernorm_zero_centered_gamma}: with {norm_affine} norms have no weights"
    if not config.first_input_norm and config.norm_placement in ("post", "post_residual"):
        yield "{first_input_norm}: {norm_placement} has no norm before attention"
    if config.norm_placement == "post_residual" and config.fp32_residual_connection:
        yield "{fp32_residual_connection}: with {norm_placement} the residual stream is a norm's output, in its type"
    if config.norm_placement in ("post", "post_residual") and config.apply_residual_connection_post_layernorm:
        yield "{apply_residual_connection_post_layernorm}: {norm_placement} has no norm before attention or MLP"
