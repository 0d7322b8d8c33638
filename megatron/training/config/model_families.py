"""Rules of BERT and T5 runs. An entry script says which model it trains: `pretrain(..., args_defaults={"model_family":
"bert"})`. Rules of a script that does not say so are checked where its data and model are built."""

from collections.abc import Iterator

from megatron.core.declarations.config_fields import literal_text
from megatron.core.exceptions import UserError
from megatron.core.transformer.config.heterogeneous import HETEROGENEOUS
from megatron.core.transformer.spec_utils import import_module
from megatron.training.config.parallel_checks import multiples_near
from megatron.training.config.recipes.catalogue import recipes
from megatron.training.config.settings import Settings

NAMES = {"gpt": "GPT", "bert": "BERT", "t5": "T5"}
"""Model families, and how messages call them."""

_SHORTEST = {"bert": (5, "three special tokens and at least two others"), "t5": (4, "at least two tokens")}


def of_recipe(s: Settings) -> Iterator[str]:
    """Yields a problem if another entry script trains the model of --recipe."""
    if s.recipe not in recipes() or s.model_family is None:
        return
    family = recipes()[s.recipe].model_family
    if family != s.model_family:
        yield f"{{recipe}} is a {NAMES[family]}: pretrain_{family}.py trains it"


def masked_words(s: Settings) -> Iterator[str]:
    """Yields a problem for each value that makes samples with masked words impossible."""
    if s.model_family not in _SHORTEST:
        return
    name = NAMES[s.model_family]
    shortest, contents = _SHORTEST[s.model_family]
    if s.seq_length is not None and s.seq_length < shortest:
        encoders = s.model_family == "t5" and s.provenance["encoder_seq_length"] != "derived"
        field = "encoder_seq_length" if encoders else "seq_length"
        yield f"{{{field}}}: a sample of {name} has {contents}; give {shortest} or more"
    if s.model_family == "t5" and s.decoder_seq_length is None:
        yield "{decoder_seq_length:name} is missing: the tokens of the decoder's part of a sample, such as 128"


def bert(s: Settings) -> Iterator[str]:
    """Yields a problem for each value that a BERT cannot have."""
    if s.model_family != "bert":
        return
    if s.context_parallel_size > 1:
        yield (
            "{context_parallel_size}: not yet for BERT, whose tokens attend to both sides; leave it at 1 and give "
            "{tensor_model_parallel_size:name} with {sequence_parallel:name}, or {pipeline_model_parallel_size:name}"
        )
    if s.calculate_per_token_loss and s.bert_binary_head:
        yield (
            "{calculate_per_token_loss}: the loss of the binary head is per sample, not per token; leave it out, "
            "or give {bert_binary_head:name}"
        )
    fewest = 2 if s.bert_binary_head else 0
    if s.bert_num_tokentypes is not None and s.bert_num_tokentypes < fewest:
        with_head = ", since the binary head has two segments" if fewest else ""
        yield f"{{bert_num_tokentypes}} must be at least {fewest}{with_head}"
    if s.mtp_num_layers:
        yield "{mtp_num_layers}: BERT predicts masked tokens only; leave it out"
    for field in ("multi_latent_attention", "hybrid_layer_pattern"):
        if getattr(s, field):
            yield f"{{{field}}}: not yet for BERT; leave it out"
    if any(getattr(s, field) is not None for field in HETEROGENEOUS):
        yield "{heterogeneous_layers_config_path:name}: not yet for BERT; leave it out"


def encoder_and_decoder(s: Settings) -> Iterator[str]:
    """Yields a problem for each value that a model with encoder and decoder cannot have."""
    if not s.num_encoder_layers:
        return
    for field in ("num_moe_experts", "multi_latent_attention", "mtp_num_layers", "group_query_attention"):
        if getattr(s, field):
            yield f"{{{field}}}: T5's layers have no such part; leave it out"
    if s.model_family == "t5":  # the layers of a script of its own may have them
        for field in ("qk_layernorm", "attention_output_gate", "experimental_attention_variant"):
            if getattr(s, field):
                yield f"{{{field}}}: T5's layers have no such part; leave it out"
        if s.norm_placement != "pre":
            yield "{norm_placement}: T5's layers have their norms before attention and MLP; pre works"
    if s.context_parallel_size > 1:
        yield "{context_parallel_size}: T5 does not split sequences; use 1"
    if s.position_embedding_type == "none":
        yield "{position_embedding_type}: T5 has learned_absolute, rope or relative"
    if s.num_encoder_layers < 1:
        yield "{encoder_num_layers} must be at least 1"
    if s.encoder_tensor_model_parallel_size not in (0, s.tensor_model_parallel_size):
        yield (
            "{encoder_tensor_model_parallel_size}: the encoder has the tensor parallel size of the decoder, "
            "{tensor_model_parallel_size}; give that, or leave it out"
        )
    if s.encoder_pipeline_model_parallel_size < 0:
        yield "{encoder_pipeline_model_parallel_size} must be at least 0"
    yield from _decoder_length(s)


def _decoder_length(s: Settings) -> Iterator[str]:
    length, tensor = s.decoder_seq_length, s.tensor_model_parallel_size
    if length is None or length < 1:
        return
    if s.sequence_parallel and tensor > 1 and length % tensor:
        yield (
            "{sequence_parallel}: {decoder_seq_length} is not divisible by {tensor_model_parallel_size}; "
            f"use {multiples_near(length, tensor)}"
        )
    learned = s.position_embedding_type == "learned_absolute"
    if learned and s.max_position_embeddings is not None and length > s.max_position_embeddings:
        yield "{decoder_seq_length} is longer than {max_position_embeddings}; raise the latter to at least the former"


def layers_of_spec(s: Settings) -> Iterator[str]:
    """Yields a problem if --spec does not name an object that can be imported."""
    if s.spec is None or s.spec == ["local"]:
        return
    if s.model_family == "t5" or s.num_encoder_layers:
        yield "{spec}: T5 has two stacks of layers, which one spec cannot describe; leave it out"
    elif any(getattr(s, name) is not None for name in HETEROGENEOUS):
        yield "{spec} does not go with {heterogeneous_layers_config_path:name}, which describes layers; leave it out"
    elif len(s.spec) != 2:
        yield "{spec}: expected a module and a name in it, such as my_layers my_layer_spec"
    else:
        try:
            import_module((s.spec[0], s.spec[1]))
        except UserError as error:
            yield f"{{spec}}: {literal_text(str(error))}"


def one_stack(s: Settings) -> Iterator[str]:
    """Yields a problem for each value that only a model with encoder and decoder can have."""
    if s.num_encoder_layers or s.model_family == "t5":
        return
    if s.position_embedding_type == "relative":
        yield "{position_embedding_type} is for T5; learned_absolute, rope, none work"
    if s.pipeline_model_parallel_split_rank is not None and s.pipeline_model_parallel_size > 1:
        yield "{pipeline_model_parallel_split_rank} is for T5; other models have no decoder"
