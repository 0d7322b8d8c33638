"""What a plan cannot be made without: asked for, never guessed."""

from collections.abc import Iterator
from pathlib import Path

from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.diagnosis.planning.hardware import gpu_of
from megatron.diagnosis.planning.settings_of_run import tokenizer_flags
from megatron.diagnosis.planning.specification import Specification

_QUESTIONS = {
    "params": "How many parameters shall the model have, such as 7B (Parameter count, --params)?",
    "seq_length": "How many tokens has the longest row, such as 8192 (Max sequence length, --seq-length)?",
    "gpus": "How many GPUs are there in all, such as 64 (Total GPUs, --gpus)?",
    "gpu": "Of which type are the GPUs, such as H100 80GB (GPU type and memory, --gpu)?",
    "tokenizer": "Which tokenizer encodes the text, with its vocabulary size (Tokenizer, --tokenizer)?",
    "tokens": "On how many tokens shall the model train, such as 2T (Total tokens, --tokens)?",
}

_VOCABULARIES = {
    "llama3": 128_256,
    "llama2": 32_000,
    "gpt2": 50_257,
    "gpt3": 50_257,
    "cl100k": 100_277,
    "o200k": 200_019,
}
"""Numbers of ids of well-known tokenizers, by the beginning of their names in small letters and digits."""


def questions(specification: Specification) -> Iterator[str]:
    """Yields a question for each value that is missing. Each ends with a question mark."""
    for field, question in _QUESTIONS.items():
        if not specification.is_given(field):
            yield question
    if specification.gpu is not None:
        _, question = gpu_of(specification.gpu)
        if question:
            yield question
    tokenizer = specification.tokenizer
    if tokenizer is not None and tokenizer_ids(specification) is None and specification.vocab_size is None:
        yield f"How many ids has the tokenizer {tokenizer.name} (Vocabulary size, --vocab-size)?"


def tokenizer_ids(specification: Specification) -> int | None:
    """Returns the number of ids of the tokenizer: as it was said, as its files say, or as it is known; None if it is
    none of these. Raises UserError if its files are no tokenizer."""
    tokenizer = specification.tokenizer
    if tokenizer is None:
        return None
    if tokenizer.vocab_size is not None:
        return tokenizer.vocab_size
    flags = tokenizer_flags(tokenizer.name, 1)
    if (
        any(flags.get(field) == tokenizer.name for field in ("tokenizer_model", "vocab_file"))
        and Path(tokenizer.name).exists()
    ):
        return build_tokenizer(TokenizerConfig(**flags)).vocab_size
    plain = "".join(letter for letter in tokenizer.name.lower() if letter.isalnum())
    plain = plain.removeprefix("metallamameta").removeprefix("metallama").removeprefix("tiktoken")
    plain = plain if plain.startswith("llama") or not plain[:1].isdigit() else f"llama{plain}"
    return next((size for name, size in _VOCABULARIES.items() if plain.startswith(name)), None)
