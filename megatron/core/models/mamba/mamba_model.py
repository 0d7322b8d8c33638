"""Hybrid language models under the name of releases before 0.17."""

from collections.abc import Callable
from typing import Literal

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class MambaModel(HybridModel):
    """A HybridModel with the parameters of releases before 0.17, in their order.

    With `hybrid_override_pattern` or a ratio, the config needs `is_hybrid_model`. `mamba_stack_spec` is the function of
    this name, or another function with the same arguments. Raises UserError for an impossible pattern.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mamba_stack_spec: Callable[..., TransformerBlockSubmodules],
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        hybrid_attention_ratio: float = 0.0,
        hybrid_mlp_ratio: float = 0.0,
        hybrid_override_pattern: str | None = None,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "none"] = "none",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        vocab_padding_multiple: int | None = None,
    ) -> None:
        asks = hybrid_override_pattern is not None or hybrid_attention_ratio or hybrid_mlp_ratio
        if asks and not config.is_hybrid_model:
            raise UserError("MambaModel: the config is not that of a hybrid model; make it with is_hybrid_model")
        super().__init__(
            config,
            mamba_stack_spec,
            vocab_size,
            max_sequence_length,
            hybrid_attention_ratio=hybrid_attention_ratio,
            hybrid_mlp_ratio=hybrid_mlp_ratio,
            hybrid_override_pattern=hybrid_override_pattern,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=fp16_lm_cross_entropy,
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
            position_embedding_type=position_embedding_type,
            rotary_percent=rotary_percent,
            rotary_base=rotary_base,
            scatter_embedding_sequence_parallel=scatter_embedding_sequence_parallel,
            seq_len_interpolation_factor=seq_len_interpolation_factor,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            vocab_padding_multiple=vocab_padding_multiple,
        )
