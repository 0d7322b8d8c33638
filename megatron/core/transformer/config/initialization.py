"""Initial weights, and the values that depend on the width of the model under muP.

muP (maximal update parameterization; Yang et al. 2022, arXiv:2203.03466, table 8) makes hyperparameters that were tuned
at a small width good at every width. With m = hidden_size / mup_base_hidden_size:

| what | under muP |
|---|---|
| standard deviation of the matrices of layers | divided by sqrt(m); that of embeddings and of the output layer is not |
| learning rate of the matrices of layers, with Adam | divided by m; with SGD all other rates are multiplied by m |
| logits | multiplied by 1 / m, or by mup_output_mult |
| output of the embedding | multiplied by mup_embedding_mult |
| scores | sqrt(mup_base_head_dim) / kv_channels^mup_attn_scale_power in place of 1 / sqrt(kv_channels) |
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.core.declarations.config_fields import flag, not_a_flag, too_small

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(kw_only=True)
class InitializationConfig:
    """Distributions of initial weights."""

    init_method: Callable[[Tensor], Any] | None = not_a_flag(None)
    """Initializes a weight; None: Normal(init_method_std)."""

    output_layer_init_method: Callable[[Tensor], Any] | None = not_a_flag(None)
    """Initializes the output projections of attention and MLP; None: Normal(init_method_std / sqrt(2 * layers))."""

    init_method_std: float = flag(0.02, only_with="init_method_xavier_uniform!=True")
    """Standard deviation of initial weights."""

    embedding_init_method: Callable[[Tensor], Any] | None = not_a_flag(None)
    """Initializes the embeddings; None: Normal(embedding_init_method_std)."""

    embedding_init_method_std: float | None = flag(None, only_with="init_method_xavier_uniform!=True")
    """Standard deviation of initial embeddings. Default: --init-method-std."""

    use_mup: bool = False
    """Scale initial weights, learning rates, logits and scores with the width of the model (muP), so that
    hyperparameters of a small model also work for a wide one. Give --lr and --init-method-std for the base width."""

    mup_base_hidden_size: int | None = flag(None, only_with="use_mup")
    """With --use-mup: hidden size of the model for which the hyperparameters were tuned. Default: --hidden-size."""

    mup_width_mult: float = flag(1.0, no_effect="it is always --hidden-size / --mup-base-hidden-size")
    """With --use-mup: how many times wider than the base the model is."""

    mup_embedding_mult: float = flag(1.0, only_with="use_mup")
    """With --use-mup: factor of the embedding's output."""

    mup_output_mult: float = flag(1.0, only_with="use_mup")
    """With --use-mup: factor of the logits. Left at 1, it is base width / width."""

    mup_base_head_dim: float | None = flag(None, only_with="use_mup")
    """With --use-mup: width of a head of the base model. Scores are scaled by its square root, so that the base model
    keeps the usual 1 / sqrt(width of a head)."""

    mup_attn_scale_power: float = flag(1.0, only_with="use_mup")
    """With --use-mup: scores are divided by the width of a head to this power."""

    init_model_with_meta_device: bool = False
    """Build the model without allocating memory; memory is allocated unit by unit while the model is sharded. For
    models that are too large for one rank."""


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each impossible value of `InitializationConfig`."""
    yield from too_small(config, ("init_method_std", "embedding_init_method_std"), 0)
    yield from too_small(config, ("mup_base_hidden_size",), 1)
    for name in ("mup_embedding_mult", "mup_output_mult"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) != 0.0):
            yield f"{{{name}}} must be a number other than 0"
    if config.mup_base_head_dim is not None and not 0.0 < config.mup_base_head_dim < math.inf:
        yield "{mup_base_head_dim} must be larger than 0"
    if config.use_mup and config.multi_latent_attention:
        yield "{use_mup}: not yet with {multi_latent_attention}"


def scale_with_width(config: "TransformerConfig") -> None:
    """Writes muP's values into a complete TransformerConfig: the width factor, and the scales of embedding, logits and
    scores."""
    config.mup_width_mult = config.hidden_size / (config.mup_base_hidden_size or config.hidden_size)
    config.embedding_multiplier = config.mup_embedding_mult
    config.logit_scale = config.mup_output_mult if config.mup_output_mult != 1.0 else 1.0 / config.mup_width_mult
    assert config.kv_channels is not None
    config.softmax_scale = math.sqrt(config.mup_base_head_dim or 1.0) / config.kv_channels**config.mup_attn_scale_power
