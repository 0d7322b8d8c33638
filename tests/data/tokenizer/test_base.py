"""megatron/data/tokenizer/base.py: literals are found leftmost and longest, as a plain alternation finds them."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.tokenizer.base import MegatronTokenizer, pack_ids, pattern_of_literals
from megatron.data.tokenizer.null import NullTokenizer

words = st.lists(st.text("ab|<(", min_size=1, max_size=4), min_size=1, max_size=8)


@settings(deadline=None)
@given(words, st.text("ab|<(", max_size=20))
def test_literals(literals, text):
    longest_first = sorted(literals, key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, longest_first)))
    ours = pattern_of_literals(literals)
    assert [match.span() for match in ours.finditer(text)] == [match.span() for match in plain.finditer(text)]


def test_no_literals():
    assert pattern_of_literals([]) is None
    assert not NullTokenizer(3).holds_special_literal("<s>")


def test_packing():
    packed = pack_ids([[1, 2], [], [3]])
    assert packed.ids.tolist() == [1, 2, 3] and packed.lengths.tolist() == [2, 0, 1]
    assert pack_ids([]).ids.size == 0


def test_identity():
    ours = NullTokenizer(5)
    assert ours.unique_identifiers == {"tokenizer": "NullTokenizer", "vocab_size": 6, "digest": ours.digest}
    assert ours.digest == NullTokenizer(5).digest != NullTokenizer(6).digest


def test_a_scripts_own_tokenizer():
    class Letters(MegatronTokenizer):
        vocab_size, eod = 27, 26

        def tokenize(self, text):
            return [ord(letter) - ord("a") for letter in text]

        def detokenize(self, ids):
            return "".join(chr(ord("a") + i) for i in ids)

    letters, others = Letters("letters.txt", lower=True), Letters("letters.txt", lower=False)
    assert letters.detokenize(letters.tokenize("abc")) == "abc" and letters.pad is None
    assert letters.unique_identifiers != others.unique_identifiers
