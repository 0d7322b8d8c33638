"""Configuration of a transformer: every field of Megatron-LM, divided by concern into the mixins of `config/`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.core.context_parallel.comm_types import comm_type_problems, regrouping_problems
from megatron.core.declarations.config_fields import not_a_flag, refuse
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.groups.rank_grid import divisors, parallel_sizes_near
from megatron.core.initializers import Normal
from megatron.core.pipeline_parallel.stage_map import stage_problems
from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.core.transformer.config import (
    architecture,
    attention,
    fusions,
    heterogeneous,
    hybrid,
    inference,
    initialization,
    latent_attention,
    low_precision,
    memory,
    moe,
    positions,
    router,
    stages,
    token_mixers,
)
from megatron.core.transformer.layer_patterns import has_heads, hybrid_letters, prediction_letters, stages_of_pattern


@dataclass(kw_only=True)
class TransformerConfig(
    architecture.ArchitectureConfig,
    attention.AttentionConfig,
    positions.PositionConfig,
    initialization.InitializationConfig,
    fusions.FusionConfig,
    memory.MemoryConfig,
    low_precision.LowPrecisionConfig,
    stages.StageConfig,
    moe.MoEConfig,
    router.RouterConfig,
    token_mixers.TokenMixerConfig,
    hybrid.HybridConfig,
    heterogeneous.HeterogeneousConfig,
    inference.InferenceConfig,
    ModelParallelConfig,
):
    """A complete description of a transformer. Fields that are None are derived when the config is made.

    Derived: `ffn_hidden_size` (4 * hidden_size), `kv_channels` (hidden_size / heads), `num_query_groups` (heads),
    `add_qkv_bias` (True with `add_bias_linear`), `params_dtype`, the three init methods; the number of virtual pipeline
    stages and `mtp_standalone`, if a layout or a schedule determines them; the content of
    `heterogeneous_layers_config_path` as `heterogeneous_layers_config_encoded_json`. Output projections are initialized
    with a standard deviation that is smaller by sqrt(2 * num_layers), where num_layers is that of the whole model. In a
    hybrid model it is smaller by sqrt(num_layers), because each layer is added to the residual stream once. With
    `use_mup` also `mup_width_mult`, `embedding_multiplier`, `logit_scale` and `softmax_scale`; values given for them
    have no effect.

    Raises UserError if a value is impossible or its feature is not implemented yet.
    """

    def __post_init__(self) -> None:
        wide_residual = self.fp32_residual_connection and self.pipeline_dtype is None
        super().__post_init__()
        if wide_residual:  # which is what stages hand on
            self.pipeline_dtype = torch.promote_types(self.params_dtype, torch.float32)
        self._derive_hybrid()
        refuse(transformer_problems(self), self)
        self.heterogeneous_layers_config_encoded_json = heterogeneous.encoded_layers(self)
        self.heterogeneous_block_specs = self.heterogeneous_layers_config_encoded_json is not None
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
        self.mtp_standalone = stages.has_prediction_stage(self)
        if self.use_mup:
            initialization.scale_with_width(self)
        self._derive_init_methods()

    def _derive_hybrid(self) -> None:
        """Sets the number of layers and the pipeline stages from the letters of a hybrid model."""
        if self.is_hybrid_model and self.hybrid_layer_pattern is None:
            self.hybrid_layer_pattern = "M" * self.num_layers
        letters = hybrid_letters(self)
        self.is_hybrid_model = letters is not None
        self.num_layers = self.num_layers or len(letters or "")
        self.mtp_num_layers = self.mtp_num_layers or len(prediction_letters(self)) or self.mtp_num_layers
        if self.pipeline_model_parallel_layout is None and self.pipeline_model_parallel_size > 1:
            self.pipeline_model_parallel_layout = stages_of_pattern(self.hybrid_layer_pattern)

    def _derive_init_methods(self) -> None:
        if self.embedding_init_method is None:
            if self.embedding_init_method_std is None and self.init_method is not None:
                self.embedding_init_method = self.init_method
            else:
                own = self.embedding_init_method_std
                self.embedding_init_method = Normal(self.init_method_std if own is None else own)
        std = self.init_method_std / math.sqrt(self.mup_width_mult) if self.use_mup else self.init_method_std
        if self.init_method is None:
            self.init_method = Normal(std)
        if self.output_layer_init_method is None:
            added = self.num_layers if self.is_hybrid_model else 2.0 * self.num_layers
            self.output_layer_init_method = Normal(std / math.sqrt(added))


def transformer_problems(config: TransformerConfig) -> Iterator[str]:
    """Yields a problem for each impossible value, or pair of values, of a transformer.

    `config` has the fields of TransformerConfig; the caller checks that the required sizes are given.
    """
    for concern in (
        architecture,
        attention,
        initialization,
        positions,
        latent_attention,
        stages,
        moe,
        memory,
        router,
        token_mixers,
        low_precision,
        hybrid,
        heterogeneous,
    ):
        yield from concern.validate(config)
    if all((getattr(config, name) or 0) >= 1 for name in ("num_layers", "hidden_size", "num_attention_heads")):
        yield from _split_problems(config)
    yield from stage_problems(config)
    yield from comm_type_problems(config, has_heads(config))
    yield from regrouping_problems(config)


def _split_problems(config: TransformerConfig) -> Iterator[str]:
    """Yields a problem unless tensor parallel ranks get equal numbers of heads and of the MLP's channels. Groups of
    keys and values are divided among the ranks; if there are fewer groups than ranks, equally many ranks hold each."""
    tensor, heads = config.tensor_model_parallel_size, config.num_attention_heads
    groups = config.num_query_groups or heads
    if not has_heads(config):
        heads = groups = tensor
    width = config.ffn_hidden_size or 4 * config.hidden_size
    if tensor < 1 or groups < 1 or width < 1:
        return
    fitting = [size for size in divisors(math.gcd(heads, width)) if groups % size == 0 or size % groups == 0]
    if tensor in fitting:
        return
    works = parallel_sizes_near(fitting, tensor, config)
    if heads % tensor:
        yield f"{{tensor_model_parallel_size}} does not divide {{num_attention_heads}}; use {works}"
    elif width % tensor:
        what = "{ffn_hidden_size}" if config.ffn_hidden_size else f"the {width} channels of the MLP"
        yield f"{{tensor_model_parallel_size}} does not divide {what}; use {works}"
    else:
        yield f"{{tensor_model_parallel_size}} and {{num_query_groups}}: neither divides the other; use {works}"


@dataclass(kw_only=True)
class MLATransformerConfig(latent_attention.LatentAttentionConfig, TransformerConfig):
    """A transformer with multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).

    `kv_channels` has no effect. Norms are RMSNorm by default.
    """

    normalization: Literal["LayerNorm", "RMSNorm"] = not_a_flag("RMSNorm")
    """LayerNorm or RMSNorm."""

    multi_latent_attention: bool = not_a_flag(True)
    """Keys and values come from a low-rank state."""
