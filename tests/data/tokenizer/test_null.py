"""megatron/data/tokenizer/null.py."""

import pytest

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.null import NullTokenizer


def test_text_is_ids():
    ours = NullTokenizer(100)
    assert (ours.vocab_size, ours.eod, ours.pad) == (101, 100, None)
    assert ours.tokenize("5 0 99") == [5, 0, 99] and ours.tokenize("") == []
    assert ours.detokenize([5, 0, 99]) == "5 0 99"
    assert ours.encode_texts(["1 2", "", "3"]).ids.tolist() == [1, 2, 3]


def test_other_special_ids():
    ours = NullTokenizer(100, eod=3, pad=4)
    assert (ours.vocab_size, ours.eod, ours.pad) == (101, 3, 4)
    assert ours.digest != NullTokenizer(100).digest


@pytest.mark.parametrize(
    ("text", "says"), [("1  2", "found ''"), ("1 x", "found 'x'"), ("101", "101 is outside 0 to 100")]
)
def test_bad_text(text, says):
    with pytest.raises(UserError, match=says):
        NullTokenizer(100).tokenize(text)
