"""Configuration of a transformer: every published field, cut by concern into the mixins of `config/`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.core.config_fields import flag, not_a_flag, refuse, too_small
from megatron.core.context_parallel.comm_types import comm_type_problems
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parameters import Normal
from megatron.core.pipeline_parallel.stages import pipeline_of, stage_problems
from megatron.core.rank_grid import divisors
from megatron.core.transformer.config.architecture import ArchitectureConfig
from megatron.core.transformer.config.attention import AttentionConfig
from megatron.core.transformer.config.expert_problems import expert_problems
from megatron.core.transformer.config.fusions import FusionConfig
from megatron.core.transformer.config.inference import InferenceConfig
from megatron.core.transformer.config.initialization import InitializationConfig
from megatron.core.transformer.config.latent_attention_problems import latent_attention_problems
from megatron.core.transformer.config.low_precision import LowPrecisionConfig
from megatron.core.transformer.config.memory import MemoryConfig
from megatron.core.transformer.config.model_option_problems import model_option_problems
from megatron.core.transformer.config.moe import MoEConfig
from megatron.core.transformer.config.position_problems import position_problems
from megatron.core.transformer.config.positions import PositionConfig
from megatron.core.transformer.config.prediction_problems import prediction_problems, predicts_apart
from megatron.core.transformer.config.recompute_problems import recompute_problems
from megatron.core.transformer.config.router_problems import router_problems
from megatron.core.transformer.config.stages import StageConfig
from megatron.core.transformer.config.token_mixers import TokenMixerConfig


@dataclass(kw_only=True)
class TransformerConfig(
    ArchitectureConfig,
    AttentionConfig,
    PositionConfig,
    InitializationConfig,
    FusionConfig,
    MemoryConfig,
    LowPrecisionConfig,
    StageConfig,
    MoEConfig,
    TokenMixerConfig,
    InferenceConfig,
    ModelParallelConfig,
):
    """A transformer, completely described: what is left at None is derived when the config is made.

    Derived: `ffn_hidden_size` (4 * hidden_size), `kv_channels` (hidden_size / heads), `num_query_groups` (heads),
    `add_qkv_bias` (with `add_bias_linear`), `params_dtype`, the three init methods, and the number of virtual pipeline
    stages, and `mtp_standalone`, where a layout or a schedule says it. Output projections start with
    a standard deviation that is smaller by sqrt(2 * num_layers), num_layers being those of the whole model.

    Raises UserError when a value is impossible or its feature is still to come.
    """

    def __post_init__(self) -> None:
        wide_residual = self.fp32_residual_connection and self.pipeline_dtype is None
        super().__post_init__()
        if wide_residual:  # which is what stages hand on
            self.pipeline_dtype = torch.promote_types(self.params_dtype, torch.float32)
        refuse(transformer_problems(self), self)
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.kv_channels is None:
            self.kv_channels = max(1, self.hidden_size // self.num_attention_heads)
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.num_moe_experts is not None and self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
        self.add_qkv_bias = self.add_qkv_bias or self.add_bias_linear
        self.attention_softmax_in_fp32 = self.attention_softmax_in_fp32 or self.apply_query_key_layer_scaling
        chunks = pipeline_of(self).chunks  # a layout or a schedule may say how many
        self.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
        self.mtp_standalone = predicts_apart(self)
        self._derive_init_methods()

    def _derive_init_methods(self) -> None:
        if self.embedding_init_method is None:
            if self.embedding_init_method_std is None and self.init_method is not None:
                self.embedding_init_method = self.init_method
            else:
                std = self.embedding_init_method_std
                self.embedding_init_method = Normal(self.init_method_std if std is None else std)
        if self.init_method is None:
            self.init_method = Normal(self.init_method_std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = Normal(self.init_method_std / math.sqrt(2.0 * self.num_layers))


def transformer_problems(config: Any) -> Iterator[str]:
    """A problem for each value, or pair of values, of which no transformer can be made.

    `config` has the fields of TransformerConfig; None in the three sizes that every model needs is left to the caller.
    """
    others = ("ffn_hidden_size", "kv_channels", "num_query_groups", "recompute_num_layers")
    yield from too_small(config, (*_SIZES, *others), 1)
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0.0 <= getattr(config, name) < 1.0:
            yield f"{{{name}}} must be at least 0 and less than 1"
    yield from too_small(config, ("init_method_std", "embedding_init_method_std", "layernorm_epsilon"), 0)
    if all((getattr(config, name) or 0) >= 1 for name in _SIZES):
        yield from _head_problems(config)
        yield from _split_problems(config)
    yield from position_problems(config)
    yield from model_option_problems(config)
    yield from latent_attention_problems(config)
    yield from stage_problems(config)
    yield from expert_problems(config)
    yield from prediction_problems(config)
    yield from comm_type_problems(config)
    yield from recompute_problems(config)
    yield from router_problems(config)


_SIZES = ("num_layers", "hidden_size", "num_attention_heads")


def _head_problems(config: Any) -> Iterator[str]:
    heads, groups = config.num_attention_heads, config.num_query_groups
    if config.kv_channels is None and config.hidden_size % heads and not config.multi_latent_attention:
        below = config.hidden_size - config.hidden_size % heads
        works = " or ".join(str(size) for size in (below, below + heads) if size > 0)
        yield (
            f"{{hidden_size}} does not divide by {{num_attention_heads}}; {works} works, or set {{kv_channels:name}}"
        )
    if groups is not None and groups > 0 and heads % groups:
        nearest = min(divisors(heads), key=lambda divisor: abs(divisor - groups))
        yield f"{{num_query_groups}} does not divide {{num_attention_heads}}; the nearest that does is {nearest}"


def _split_problems(config: Any) -> Iterator[str]:
    """Tensor parallel ranks take equal numbers of heads and of the MLP's channels. Groups of keys and values are shared
    out, or, if there are fewer, each is held by equally many ranks."""
    tensor, heads = config.tensor_model_parallel_size, config.num_attention_heads
    groups = config.num_query_groups or heads
    width = config.ffn_hidden_size or 4 * config.hidden_size
    if tensor < 1 or groups < 1 or width < 1:
        return
    fitting = [size for size in divisors(math.gcd(heads, width)) if groups % size == 0 or size % groups == 0]
    if tensor in fitting:
        return
    near = [size for size in fitting if size < tensor][-1:] + [size for size in fitting if size > tensor][:1]
    works = " or ".join(map(str, near))
    if heads % tensor:
        yield f"{{tensor_model_parallel_size}} does not divide {{num_attention_heads}}; {works} works"
    elif width % tensor:
        what = "{ffn_hidden_size}" if config.ffn_hidden_size else f"the {width} channels of the MLP"
        yield f"{{tensor_model_parallel_size}} does not divide {what}; {works} works"
    else:
        yield f"{{tensor_model_parallel_size}} and {{num_query_groups}}: neither divides the other; {works} works"


@dataclass(kw_only=True)
class MLATransformerConfig(TransformerConfig):
    """A transformer with multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).

    `kv_channels` has no meaning for it. Norms are RMSNorm unless the config says otherwise.
    """

    normalization: Literal["LayerNorm", "RMSNorm"] = not_a_flag("RMSNorm")
    """LayerNorm or RMSNorm."""

    multi_latent_attention: bool = not_a_flag(True)
    """Keys and values come from a low-rank state."""

    q_lora_rank: int | None = flag(512, only_with="multi_latent_attention")
    """Rank of the query projection; None: a plain one."""

    kv_lora_rank: int = flag(512, only_with="multi_latent_attention")
    """Width of the state that keys and values come from."""

    qk_head_dim: int = flag(128, only_with="multi_latent_attention")
    """Width of a query or key head, its rotary part aside."""

    qk_pos_emb_head_dim: int = flag(64, only_with="multi_latent_attention")
    """Width of the rotary part of a query or key head."""

    v_head_dim: int = flag(128, only_with="multi_latent_attention")
    """Width of a value head."""

    rope_type: Literal["rope", "yarn"] = flag("yarn", only_with="multi_latent_attention")
    """Rotary positions: rope or yarn."""

    rotary_base: float = not_a_flag(10000)
    """Base of the rotary frequencies."""

    rotary_percent: float = not_a_flag(1.0)
    """Part of a head that is turned."""

    rotary_scaling_factor: float = flag(40, only_with="multi_latent_attention")
    """YaRN: how many times longer the context is than the model was first trained for."""

    original_max_position_embeddings: int = flag(4096, only_with="multi_latent_attention")
    """YaRN: the context that the model was first trained for."""

    beta_fast: float = flag(32, only_with="multi_latent_attention")
    """YaRN: turns within that context above which frequencies stay."""

    beta_slow: float = flag(1, only_with="multi_latent_attention")
    """YaRN: turns within that context below which frequencies are divided."""

    mscale: float = flag(1.0, only_with="multi_latent_attention")
    """YaRN: scale of cosine and sine."""

    mscale_all_dim: float = flag(0.0, only_with="multi_latent_attention")
    """YaRN: scale of the softmax."""

    cache_mla_latents: bool = flag(False, only_with="multi_latent_attention")
    """Cache the low-rank state when decoding."""
