"""megatron/data/tokenizer/tiktoken.py: specials first, ranks after; the two patterns; literal specials."""

import base64
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.tiktoken import TikTokenizer

EXTRA = [b"He", b"ll", b"Hell", b"Hello", b" w", b"12", b"\n\n", b"or", b"ld", b"wor"]


@pytest.fixture
def model(tmp_path):
    tokens = [bytes([b]) for b in range(256)] + EXTRA
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("latin-1")}
        for rank, token in enumerate(tokens)
    ]
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(entries))
    return str(path)


def merge_by_rank(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    parts = [bytes([b]) for b in word]
    while True:
        joined = [(ranks.get(a + b, 1 << 30), k) for k, (a, b) in enumerate(itertools.pairwise(parts))]
        if not joined or min(joined)[0] == 1 << 30:
            return [ranks[part] for part in parts]
        k = min(joined)[1]
        parts[k : k + 2] = [parts[k] + parts[k + 1]]


def test_ids_are_specials_then_ranks(model):
    ours = TikTokenizer(model, "v2", vocab_size=286, num_special_tokens=20)
    assert (ours.vocab_size, ours.eod, ours.bos, ours.pad) == (286, 2, 1, 4)
    ranks = {bytes([b]): b + 20 for b in range(256)} | {token: 276 + k for k, token in enumerate(EXTRA)}
    words = [b"Hello", b" world", b"\n\n", b"1", b"2"]
    expected = [i for word in words for i in merge_by_rank(word, ranks)]
    assert ours.tokenize("Hello world\n\n12") == expected
    assert ours.detokenize(expected) == "Hello world\n\n12"
    encoded = ours.encode_texts(["", "Hello", "1"])
    assert encoded.lengths.tolist() == [0, 1, 1] and encoded.ids.dtype == np.int32


def test_patterns_differ_on_case(model):
    camel = [TikTokenizer(model, pattern, 286, 20).tokenize("HelloHello") for pattern in ("v1", "v2")]
    hello = 20 + 256 + EXTRA.index(b"Hello")
    assert camel[1] == [hello, hello]
    assert camel[0] == camel[1]  # no token spans both words
    slashes = [TikTokenizer(model, pattern, 286, 20)._pattern for pattern in ("v1", "v2")]
    assert slashes[0] != slashes[1]


def test_literal_specials_match_unless_legacy(model):
    core = TikTokenizer(model, "v2", 286, 20)
    legacy = TikTokenizer(model, "v2", 286, 20, legacy=True)
    assert core.tokenize("</s><SPECIAL_19>") == [2, 19]
    assert len(legacy.tokenize("</s>")) == 4
    assert legacy.pad is None
    assert core.holds_special_literal("x<SPECIAL_7>")


def test_vocab_size_cuts_the_file(model):
    ours = TikTokenizer(model, "v1", vocab_size=277, num_special_tokens=20)
    assert max(ours.tokenize("Hello wor\n\n")) == 276


def test_errors(model, tmp_path):
    with pytest.raises(
        UserError, match=r"a list of 266 entries; --vocab-size 131072 less 1000 special tokens needs 130072"
    ):
        TikTokenizer(model)
    with pytest.raises(UserError, match=r"--tiktoken-special-tokens <a>: they must differ, contain </s>"):
        TikTokenizer(model, "v2", 286, 20, ["<a>"])
    with pytest.raises(UserError, match=r"--tokenizer-model .*none.json: No such file"):
        TikTokenizer(str(tmp_path / "none.json"))
    entries = json.loads(Path(model).read_text())
    entries[3], entries[4] = entries[4], entries[3]
    (tmp_path / "swapped.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match="entry 3 is rank 4"):
        TikTokenizer(str(tmp_path / "swapped.json"), "v2", 286, 20)
