"""Rules of BERT and T5 runs. An entry script says which model it trains: `pretrain(..., args_defaults={"model_family":
"bert"})`. Rules of a script that does not say so are checked where its data and model are built."""

from collections.abc import Iterator

from megatron.training.config.settings import Settings

NAMES = {"gpt": "GPT", "bert": "BERT", "t5": "T5"}
"""Model families, and how messages call them."""

_SHORTEST = {"bert": (5, "three special tokens and at least two others"), "t5": (4, "at least two tokens")}


def masked_words(s: Settings) -> Iterator[str]:
    """Yields a problem for each value with which samples with masked words cannot be made."""
    if s.model_family not in _SHORTEST:
        return
    name = NAMES[s.model_family]
    shortest, contents = _SHORTEST[s.model_family]
    if s.seq_length is not None and s.seq_length < shortest:
        yield f"{{seq_length}}: a sample of {name} has {contents}; give {shortest} or more"
    if s.mock_data:
        yield f"{{mock_data}}: {name} has no made-up data; give {{data_path:name}}"
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
            "{calculate_per_token_loss}: the order of two segments has a loss per sample, not per token; leave it out, "
            "or give {bert_binary_head:name}"
        )
    if s.mtp_num_layers:
        yield "{mtp_num_layers}: BERT predicts no token further ahead; leave it out"
    if s.multi_latent_attention:
        yield "{multi_latent_attention}: not yet for BERT; leave it out"
