"""The model, as far as TransformerConfig does not say it: positions, activations by name, vocabulary."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_a_flag, not_yet
from megatron.core.transformer.transformer_config import TransformerConfig

_ONE_KERNEL = "kernels are chosen with their backend when a layer is built"

_ROPE_SCALED = "give --position-embedding-type rope --rope-scaling-type "
_OTHER_POSITIONS = {word: _ROPE_SCALED + word for word in ("linear", "dynamic", "llama3", "longrope")} | {
    "yarn": _ROPE_SCALED + "yarn (with --multi-latent-attention: rope and --rope-type yarn)",
    "alibi": "give --position-embedding-type none --alibi",
    "rotary": "give --position-embedding-type rope",
    "nope": "give --position-embedding-type none",
}


@dataclass(kw_only=True, frozen=True)
class ModelConfig:
    """What GPTModel is built from."""

    transformer: TransformerConfig = not_a_flag()
    """The stack of layers."""

    # Positions -------------------------------------------------------------------------------------------------------

    max_position_embeddings: int
    """Positions that the model knows; as --seq-length when not given."""

    position_embedding_type: Literal["learned_absolute", "rope", "mrope", "relative", "none"] = flag(
        "learned_absolute", supported=["learned_absolute", "rope", "none"], hints=_OTHER_POSITIONS
    )
    """How the model knows positions: a learnt vector for each, rotation of queries and keys (rope), or not at all."""

    rotary_base: int = flag(10000, only_with="position_embedding_type=rope", or_with="multi_latent_attention")
    """With rope: base of the frequencies."""

    rotary_percent: float = flag(1.0, only_with="position_embedding_type=rope", or_with="multi_latent_attention")
    """With rope: part of each head that is rotated; with --multi-latent-attention, of --qk-pos-emb-head-dim."""

    rotary_seq_len_interpolation_factor: int | None = flag(None, only_with="position_embedding_type=rope")
    """With rope: divide positions by this, to reach longer sequences."""

    use_rope_scaling: bool = flag(False, only_with="position_embedding_type=rope")
    """With rope: stretch the low frequencies as Llama 3.1 does."""

    rope_scaling_factor: float = flag(8.0, only_with="position_embedding_type=rope")
    """With --use-rope-scaling or --rope-scaling-type: how many times longer the context becomes."""

    # Layers ----------------------------------------------------------------------------------------------------------

    group_query_attention: bool = False
    """Let groups of query heads share their keys and values; --num-query-groups says how many groups."""

    swiglu: bool = False
    """Gated MLP with SiLU."""

    squared_relu: bool = False
    """MLP with the square of ReLU."""

    quick_geglu: bool = False
    """Gated MLP with the sigmoid form of GELU."""

    geglu: bool = False
    """Gated MLP with GELU in its tanh form."""

    openai_gelu: bool = False
    """MLP with GELU in its tanh form."""

    bias_gelu_fusion: bool = flag(True, off="--no-bias-gelu-fusion")
    """GELU takes its tanh form where linear layers have biases; otherwise the exact one."""

    bias_swiglu_fusion: bool = flag(True, off="--no-bias-swiglu-fusion", no_effect=_ONE_KERNEL)
    """SwiGLU and its bias in one kernel."""

    init_method_xavier_uniform: bool = False
    """Draw weights uniformly, with bounds from their shapes (Glorot and Bengio 2010), instead of normally."""

    spec: list[str] | None = not_yet(None, nargs="*")
    """Module and name of a description of the layers to build."""

    # Vocabulary ------------------------------------------------------------------------------------------------------

    untie_embeddings_and_output_weights: bool = False
    """The output layer has weights of its own, apart from the embedding's."""

    make_vocab_size_divisible_by: int = 128
    """Round the vocabulary up to a multiple of this times the tensor parallel size. It sizes memory, not the model: the
    added entries hold zeros and take no part in the softmax."""

    # Encoders and decoders -------------------------------------------------------------------------------------------

    encoder_num_layers: int | None = None
    """Layers of an encoder; for GPT another spelling of --num-layers."""

    decoder_num_layers: int | None = not_yet(None)
    """Layers of the decoder of an encoder-decoder model."""

    bert_binary_head: bool = flag(True, off="--bert-no-binary-head", no_effect="GPT has no such head")
    """BERT predicts whether two segments belong together."""

    # Of older releases -----------------------------------------------------------------------------------------------

    use_legacy_models: bool = not_yet(False)
    """The models before megatron.core."""

    deprecated_use_mcore_models: bool = flag(
        False, on="--use-mcore-models", no_effect="there are no other models than megatron.core's"
    )
    """The models of megatron.core."""

    use_flash_attn: bool = flag(
        False, no_effect="--attention-backend chooses; flash attention is taken where it can be"
    )
    """Of older releases: flash attention."""

    fp16_lm_cross_entropy: bool = not_yet(False)
    """Compute the cross entropy in half precision."""
