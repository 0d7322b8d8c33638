"""megatron/data/tokenizer/build.py: flags to tokenizer; every mistake is named before a file is read."""

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.build import build_tokenizer, build_tokenizer_of_args, padded_vocab_size, padding_line
from megatron.data.tokenizer.config import TokenizerConfig

GOLDEN = Path(__file__).parents[2] / "data/golden/corpus"
BPE = {"vocab_file": str(GOLDEN / "gpt2bpe/vocab.json"), "merge_file": str(GOLDEN / "gpt2bpe/merges.txt")}
BERT = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(GOLDEN / "bert/vocab.txt")}


def test_families():
    assert build_tokenizer(TokenizerConfig(**BPE)).type_name == "GPT2BPETokenizer"
    hf = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(GOLDEN / "hf"))
    assert build_tokenizer(hf).vocab_size == 600
    bert = build_tokenizer(TokenizerConfig(**BERT, vocab_extra_ids=100))
    assert (bert.type_name, bert.vocab_size) == ("BertWordPieceLowerCase", 510 + 2 + 100)
    cased = build_tokenizer(TokenizerConfig(**BERT | {"tokenizer_type": "BertWordPieceCase"}))
    assert cased.type_name == "BertWordPieceCase" and cased.tokenize("The") != bert.tokenize("The")
    null = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=50257, null_tokenizer_pad_id=7)
    assert build_tokenizer(null).vocab_size == 50258 and build_tokenizer(null).pad == 7


def test_a_model_may_have_more_entries_than_its_tokenizer_ids():
    hf = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(GOLDEN / "hf")}
    assert TokenizerConfig(**hf).model_vocab_size(600) == 600
    assert TokenizerConfig(**hf, vocab_size=640).model_vocab_size(600) == 640
    assert build_tokenizer(TokenizerConfig(**hf, vocab_size=640)).vocab_size == 600
    assert TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=99).model_vocab_size(100) == 100


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "vocab_file and merge_file: GPT2BPETokenizer needs both"),
        ({"tokenizer_model": "x"}, "needs both, not tokenizer_model x"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "tokenizer_model: HuggingFaceTokenizer needs a tokenizer.json"),
        ({"tokenizer_type": "TikTokenizer"}, "tokenizer_model: TikTokenizer needs a .json"),
        ({"tokenizer_type": "BertWordPieceCase"}, "vocab_file: BertWordPieceCase needs a vocab.txt"),
        ({**BERT, "vocab_extra_ids": -1}, "vocab_extra_ids -1: must be at least 0"),
        ({**BERT, "vocab_size": 510}, "--vocab-size 510: the BertWordPieceLowerCase has 512 ids"),
        ({"tokenizer_type": "NullTokenizer"}, "vocab_size: NullTokenizer needs it"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "vocab_size 0: must be at least 1"),
        (
            {
                "tokenizer_type": "NullTokenizer",
                "vocab_size": 9,
                "null_tokenizer_eod_id": 10,
                "null_tokenizer_pad_id": -2,
            },
            "null_tokenizer_eod_id 10: must be from 0 to vocab_size 9; null_tokenizer_pad_id -2",
        ),
        ({"tokenizer_type": "Llama2Tokenizer"}, "tokenizer_model: Llama2Tokenizer needs a .model file"),
        (
            {"tokenizer_type": "MultimodalTokenizer"},
            "not yet; what works so far is GPT2BPETokenizer or HuggingFaceTokenizer",
        ),
        ({**BPE, "vocab_extra_ids": 100}, "vocab_extra_ids 100: GPT2BPETokenizer has no extra ids"),
        ({**BPE, "vocab_size": 599}, "--vocab-size 599: the GPT2BPETokenizer has 600 ids"),
    ],
)
def test_mistakes(config, says):
    with pytest.raises(UserError) as error:
        build_tokenizer(TokenizerConfig(**config))
    assert says in str(error.value)


def test_a_padded_size_is_a_number_that_knows_what_from():
    size = padded_vocab_size(50257, 128, 2)
    assert size == 50432 and size.unpadded == 50257 and f"{size:,}" == "50,432" and json.dumps(size) == "50432"
    for twin in (copy.deepcopy(size), pickle.loads(pickle.dumps(size))):
        assert (twin, twin.unpadded) == (50432, 50257)
    assert type(size + 0) is int  # a number that was computed from it is no vocabulary


def test_padding():
    assert padded_vocab_size(50257, 128, 1) == 50304
    assert padded_vocab_size(50304, 128, 1) == 50304
    assert padded_vocab_size(50257, 128, 8) == 51200
    line = " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)"
    assert padding_line(50257, 50304) == line


def test_arguments_with_the_settings():
    args = SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=99, padded_vocab_size=None, rank=0)
    assert build_tokenizer_of_args(args).vocab_size == 100
    assert args.padded_vocab_size == 128 and args.padded_vocab_size.unpadded == 99 + 1
