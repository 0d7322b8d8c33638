"""Builds the tokenizer that the flags describe, and pads its vocabulary."""

import dataclasses
from typing import Any

from megatron.core.declarations.config_fields import refuse, unsupported_values
from megatron.core.exceptions import UserError
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.bert_wordpiece import BertWordPieceTokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.data.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.data.tokenizer.null import NullTokenizer
from megatron.data.tokenizer.sentencepiece import SentencePieceTokenizer
from megatron.data.tokenizer.sft import SFTTokenizer
from megatron.data.tokenizer.tiktoken import TikTokenizer


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Builds a tokenizer from the files that the flags name. Raises UserError, naming flag and file, if one is missing
    or invalid."""
    refuse([*unsupported_values(config), *config.validate()], config)
    tokenizer = _build(config)
    if config.vocab_size is not None and config.vocab_size < tokenizer.vocab_size and config.family != "NullTokenizer":
        raise UserError(
            f"--vocab-size {config.vocab_size}: the {config.family} has {tokenizer.vocab_size} ids; leave the flag "
            "out; if --load-hf sets it to the model's number of rows, give a tokenizer with at most that many ids"
        )
    return tokenizer


def build_tokenizer_of_args(args: Any) -> Tokenizer:
    """Returns the tokenizer that arguments describe (a namespace, or the result of `get_args()`); settings that they
    lack have their defaults. Megatron-LM's `build_tokenizer`. Sets `args.padded_vocab_size` if it is None."""
    fields = dataclasses.fields(TokenizerConfig)
    given = {field.name: getattr(args, field.name) for field in fields if hasattr(args, field.name)}
    given.pop("padded_vocab_size", None)
    config = TokenizerConfig(**given)
    tokenizer = build_tokenizer(config)
    if getattr(args, "padded_vocab_size", None) is None:
        multiple = getattr(args, "make_vocab_size_divisible_by", 128), getattr(args, "tensor_model_parallel_size", 1)
        args.padded_vocab_size = padded_vocab_size(config.model_vocab_size(tokenizer.vocab_size), *multiple)
    return tokenizer


def _build(config: TokenizerConfig) -> Tokenizer:
    match config.family:
        case "GPT2BPETokenizer":
            assert config.vocab_file is not None and config.merge_file is not None
            return GPT2BPETokenizer(config.vocab_file, config.merge_file)
        case "HuggingFaceTokenizer":
            assert config.tokenizer_model is not None
            include = config.tokenizer_hf_include_special_tokens or config.legacy_tokenizer
            return HuggingFaceTokenizer(config.tokenizer_model, include, config.vocab_extra_ids)
        case "SFTTokenizer":
            assert config.tokenizer_model is not None
            return SFTTokenizer(config.tokenizer_model, config.sft_tokenizer_prompt_format, config.chat_template)
        case "TikTokenizer":
            assert config.tokenizer_model is not None
            return TikTokenizer(
                config.tokenizer_model,
                config.tiktoken_pattern,
                config.vocab_size,
                config.tiktoken_num_special_tokens,
                config.tokenizer_special_tokens,
                config.legacy_tokenizer,
            )
        case "SentencePieceTokenizer" | "GPTSentencePieceTokenizer" | "Llama2Tokenizer":
            assert config.tokenizer_model is not None
            return SentencePieceTokenizer(
                config.tokenizer_model,
                config.family,
                adds_special_tokens=config.adds_special_tokens,
                extra_ids=config.vocab_extra_ids,
                adds_bos=config.legacy_tokenizer and config.family == "Llama2Tokenizer",
                keeps_blanks=not config.tokenizer_sentencepiece_ignore_extra_whitespaces,
            )
        case "BertWordPieceLowerCase" | "BertWordPieceCase":
            assert config.vocab_file is not None
            lower_case = config.family == "BertWordPieceLowerCase"
            return BertWordPieceTokenizer(config.vocab_file, lower_case, config.vocab_extra_ids)
        case "NullTokenizer":
            assert config.vocab_size is not None
            pad = config.null_tokenizer_pad_id
            return NullTokenizer(config.vocab_size, config.null_tokenizer_eod_id, pad if pad >= 0 else None)
    raise AssertionError(f"{config.family} passed the checks and is not built")


class PaddedSize(int):
    """A padded vocabulary size that also has the size before padding.

    Scripts use it as the integer `args.padded_vocab_size`. A model reads `unpadded` and leaves the padding out of its
    softmax, which would otherwise depend on the tensor parallel size.
    """

    unpadded: int
    """Size of the vocabulary without padding."""

    def __new__(cls, padded: int, unpadded: int) -> "PaddedSize":
        """Returns the padded size. `unpadded` is at least 1 and at most `padded`."""
        assert 0 < unpadded <= padded
        size = super().__new__(cls, padded)
        size.unpadded = unpadded
        return size

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]  # arguments of a copy
        return int(self), self.unpadded


def padded_vocab_size(
    vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int
) -> PaddedSize:
    """Rounds the vocabulary size up, so that all tensor parallel ranks hold the same number of entries."""
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return PaddedSize(-(-vocab_size // multiple) * multiple, vocab_size)


def padding_line(vocab_size: int, padded: int) -> str:
    """Returns the log line about the padding of the vocabulary."""
    return f" > padded vocab (size: {vocab_size}) with {padded - vocab_size} dummy tokens (new size: {padded})"
