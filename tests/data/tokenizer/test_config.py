"""Rules of the tokenizer flags."""

import pytest
from support.command_lines import problems_of_config

from megatron.data.tokenizer.config import TokenizerConfig


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"tokenizer_type": None},
            "--vocab-file and --merge-file: GPT2BPETokenizer needs both; --tokenizer-type",
        ),
        (
            {"tokenizer_type": "HuggingFaceTokenizer"},
            "--tokenizer-model: HuggingFaceTokenizer needs a tokenizer.json, or a folder with one",
        ),
        ({"tokenizer_type": "TikTokenizer"}, "--tokenizer-model: TikTokenizer needs a .json file"),
        ({"tokenizer_type": "BertWordPieceCase"}, "--vocab-file: BertWordPieceCase needs a vocab.txt"),
        ({"vocab_size": None}, "--vocab-size: NullTokenizer needs it"),
        ({"vocab_size": 0}, "--vocab-size 0: must be at least 1"),
        ({"null_tokenizer_eod_id": 11}, "--null-tokenizer-eod-id 11: must be from 0 to --vocab-size 10"),
        ({"null_tokenizer_pad_id": -2}, "--null-tokenizer-pad-id -2: must be -1 (none) or from 0 to --vocab-size 10"),
        ({"vocab_extra_ids": 3}, "--vocab-extra-ids 3: NullTokenizer has no extra ids"),
        ({"tiktoken_num_special_tokens": 0}, "--tiktoken-num-special-tokens 0: must be at least 1"),
    ],
)
def test_impossible_values(values: dict[str, object], problem: str) -> None:
    found = problems_of_config(TokenizerConfig, **{**GOOD, **values})
    assert len(found) == 1 and found[0].startswith(problem), found


GOOD: dict[str, object] = {"tokenizer_type": "NullTokenizer", "vocab_size": 10}


def test_possible_values_are_no_problem() -> None:
    assert problems_of_config(TokenizerConfig, **GOOD) == []


def test_the_vocabulary_of_the_model() -> None:
    assert TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10).model_vocab_size(11) == 11
    assert TokenizerConfig(vocab_size=200).model_vocab_size(150) == 200
    assert TokenizerConfig().model_vocab_size(150) == 150 and TokenizerConfig().family == "GPT2BPETokenizer"
