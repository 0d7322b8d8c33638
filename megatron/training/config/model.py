"""The model's settings that are not fields of TransformerConfig: positions, activations by name, vocabulary."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn.functional import relu, silu

from megatron.core.declarations.config_fields import flag, not_a_flag, not_yet, too_small
from megatron.core.ops.activation import gelu_erf, gelu_tanh, quick_gelu, squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig


class NamedActivation(NamedTuple):
    """The activation that a switch of `ModelConfig` chooses."""

    function: Callable[[Tensor], Tensor]
    gated: bool


ACTIVATIONS: Mapping[str, NamedActivation] = {
    "swiglu": NamedActivation(silu, gated=True),
    "geglu": NamedActivation(gelu_tanh, gated=True),
    "exact_geglu": NamedActivation(gelu_erf, gated=True),
    "quick_geglu": NamedActivation(quick_gelu, gated=True),
    "squared_relu": NamedActivation(squared_relu, gated=False),
    "relu": NamedActivation(relu, gated=False),
    "openai_gelu": NamedActivation(gelu_tanh, gated=False),
}
"""Activations by the switch that chooses them. Without a switch it is GELU."""

_ONE_KERNEL = "the backend of a layer chooses its kernels when the layer is built"

_ROPE_SCALED = "give --position-embedding-type rope --rope-scaling-type "
_OTHER_POSITIONS = {word: _ROPE_SCALED + word for word in ("linear", "dynamic", "llama3", "longrope")} | {
    "yarn": _ROPE_SCALED + "yarn (with --multi-latent-attention: rope and --rope-type yarn)",
    "alibi": "give --position-embedding-type none --alibi",
    "rotary": "give --position-embedding-type rope",
    "nope": "give --position-embedding-type none",
}


@dataclass(kw_only=True, frozen=True)
class ModelConfig:
    """The settings that GPTModel is built from."""

    transformer: TransformerConfig = not_a_flag()
    """Config of the transformer layers."""

    # Positions -------------------------------------------------------------------------------------------------------

    max_position_embeddings: int
    """Largest number of positions; --seq-length when not given."""

    position_embedding_type: Literal["learned_absolute", "rope", "mrope", "relative", "none"] = flag(
        "learned_absolute", supported=["learned_absolute", "rope", "relative", "none"], hints=_OTHER_POSITIONS
    )
    """Position information: learned_absolute (a learned vector per position), rope (rotation of queries and keys),
    relative (T5: a learned bias of attention scores by distance), or none."""

    rotary_base: int = flag(10000, only_with="position_embedding_type=rope", or_with="multi_latent_attention")
    """With rope: base of the frequencies."""

    rotary_percent: float = flag(1.0, only_with="position_embedding_type=rope", or_with="multi_latent_attention")
    """With rope: fraction of each head's channels that is rotated; with --multi-latent-attention, fraction of
    --qk-pos-emb-head-dim."""

    rotary_seq_len_interpolation_factor: int | None = flag(None, only_with="position_embedding_type=rope")
    """With rope: divide positions by this, so that the model accepts longer sequences."""

    use_rope_scaling: bool = flag(False, only_with="position_embedding_type=rope")
    """With rope: stretch the low frequencies as Llama 3.1 does."""

    rope_scaling_factor: float = flag(8.0, only_with="use_rope_scaling", or_with="rope_scaling_type")
    """With --use-rope-scaling or --rope-scaling-type: factor by which the context becomes longer."""

    relative_attention_num_buckets: int = flag(32, only_with="position_embedding_type=relative", families=["t5"])
    """T5, with --position-embedding-type relative: number of groups of distances, each with a bias of its own."""

    relative_attention_max_distance: int = flag(128, only_with="position_embedding_type=relative", families=["t5"])
    """T5, with --position-embedding-type relative: all distances of at least this number share one bias."""

    # Layers ----------------------------------------------------------------------------------------------------------

    hybrid_attention_ratio: float = flag(0.0, families=["gpt"])
    """Make a hybrid model in which this share of the layers is attention, evenly spread. --hybrid-layer-pattern gives
    the kind of each layer instead."""

    hybrid_mlp_ratio: float = flag(0.0, families=["gpt"])
    """Make a hybrid model in which this share of the layers is an MLP, evenly spread among Mamba-2 layers."""

    group_query_attention: bool = False
    """Share keys and values among groups of query heads; --num-query-groups sets the number of groups."""

    swiglu: bool = False
    """Activation: gated MLP with SiLU."""

    squared_relu: bool = False
    """Activation: square of ReLU."""

    relu: bool = False
    """Activation: ReLU."""

    quick_geglu: bool = False
    """Activation: gated MLP with GELU's sigmoid approximation."""

    geglu: bool = False
    """Activation: gated MLP with GELU's tanh approximation."""

    exact_geglu: bool = False
    """Activation: gated MLP with exact GELU."""

    openai_gelu: bool = False
    """Activation: GELU's tanh approximation."""

    bias_gelu_fusion: bool = flag(
        True,
        off="--no-bias-gelu-fusion",
        off_help="Use exact GELU where linear layers have biases too, instead of its tanh approximation.",
    )
    """Use GELU's tanh approximation where linear layers have biases, and exact GELU elsewhere."""

    bias_swiglu_fusion: bool = flag(True, off="--no-bias-swiglu-fusion", no_effect=_ONE_KERNEL)
    """Compute SwiGLU and its bias in one kernel."""

    init_method_xavier_uniform: bool = False
    """Draw initial weights from a uniform distribution with bounds from their shapes (Glorot and Bengio 2010), instead
    of a normal distribution."""

    spec: list[str] | None = flag(None, nargs="*")
    """Your own layers, as two words: a Python module and a name in it. The name is that of a layer's spec (ModuleSpec),
    of the specs of a stage's layers (TransformerBlockSubmodules), or of a function that returns one of these. The
    single word `local` means the layers that are built without the flag; T5 takes no other value."""

    # Vocabulary ------------------------------------------------------------------------------------------------------

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weights instead of sharing the embedding's."""

    make_vocab_size_divisible_by: int = 128
    """Round the vocabulary up to a multiple of this times the tensor parallel size. The added entries contain zeros and
    are left out of the softmax, so they change memory, not the model."""

    # Encoders and decoders -------------------------------------------------------------------------------------------

    encoder_num_layers: int | None = None
    """T5: layers of the encoder. Default: --num-layers. For other models another spelling of --num-layers."""

    decoder_num_layers: int | None = flag(None, families=["t5"])
    """T5: layers of the decoder. Default: --num-layers, or as many as the encoder has."""

    encoder_pipeline_model_parallel_size: int = flag(0, families=["t5"])
    """T5, older releases: number of pipeline stages of the encoder. --pipeline-model-parallel-size then counts the
    decoder's stages only."""

    encoder_tensor_model_parallel_size: int = flag(0, families=["t5"])
    """T5, older releases: tensor parallel size of the encoder. It must be 0 or equal to
    --tensor-model-parallel-size."""

    bert_binary_head: bool = flag(
        True,
        off="--bert-no-binary-head",
        off_help="BERT: train without the head that predicts whether two segments are swapped.",
        families=["bert"],
    )
    """BERT: train a head that predicts whether two segments are swapped."""

    bert_num_tokentypes: int | None = flag(None, families=["bert"])
    """BERT: number of segment types (token types) in the embedding. Default: 2 with the binary head, none without
    it."""

    bert_head_activation: Literal["gelu", "gelu_tanh", "relu"] = flag("gelu", families=["bert"])
    """BERT: activation between the dense layer and the norm before the output layer: exact GELU, its tanh
    approximation, or ReLU."""

    bert_head_bias: bool = flag(
        True,
        off="--bert-no-head-bias",
        off_help="BERT: build the dense layer before the output layer without a bias, as ModernBERT has it.",
        families=["bert"],
    )
    """BERT: the dense layer before the output layer has a bias."""

    t5_head_bias: bool = flag(
        True,
        off="--t5-no-head-bias",
        off_help="T5: add no bias to the logits, as T5 of Hugging Face.",
        families=["t5"],
        only_with="untie_embeddings_and_output_weights!=True",
    )
    """T5: add a bias to the logits if the output layer uses the embedding's weight. T5 of Hugging Face has none."""

    model_family: str | None = not_a_flag(None)
    """The family that the entry script trains: "gpt", "bert" or "t5"; None: a script that does not say so."""

    # Older releases --------------------------------------------------------------------------------------------------

    mtp_hybrid_override_pattern: str | None = flag(None, only_with="hybrid_layer_pattern", from_checkpoint=True)
    """Older releases: layer letters of each depth of multi-token prediction in a hybrid model. --hybrid-layer-pattern
    takes them after a slash (/)."""

    use_legacy_models: bool = not_yet(False)
    """Older releases: models from before megatron.core."""

    deprecated_use_mcore_models: bool = flag(
        False, on="--use-mcore-models", no_effect="there are no other models than megatron.core's"
    )
    """Older releases: models of megatron.core."""

    use_flash_attn: bool = flag(
        False, no_effect="--attention-backend chooses the kernel; auto uses flash attention where it can"
    )
    """Older releases: flash attention."""

    fp16_lm_cross_entropy: bool = flag(
        False,
        no_effect="cross entropy reads logits in the model's type and computes in float32, without a copy of them",
    )
    """Compute the cross entropy in half precision."""

    @property
    def num_tokentypes(self) -> int:
        """Number of segments that BERT's embedding distinguishes."""
        if self.bert_num_tokentypes is None:
            return 2 if self.bert_binary_head else 0
        return self.bert_num_tokentypes

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`. Does not look at
        `transformer`, which may be None."""
        sizes = ("max_position_embeddings", "make_vocab_size_divisible_by")
        yield from too_small(self, (*sizes, "rotary_base", "rotary_seq_len_interpolation_factor"), 1)
        shares = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
        yield from too_small(self, shares, 0)
        if self.hybrid_attention_ratio + self.hybrid_mlp_ratio > 1.0:
            yield "{hybrid_attention_ratio} and {hybrid_mlp_ratio} are shares of the layers; together at most 1 works"
        given = [f"{{{field}}}" for field in ACTIVATIONS if getattr(self, field)]
        if len(given) > 1:
            yield f"{' and '.join(given)} choose different activations; give one"
