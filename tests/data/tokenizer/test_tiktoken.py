"""megatron/data/tokenizer/tiktoken.py: specials first, ranks after; the two patterns; literal specials."""

import base64
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.sentencepiece import SentencePieceTokenizer
from megatron.data.tokenizer.tiktoken import TikTokenizer
from megatron.data.tokenizer.tiktoken_vocabulary import LLAMA3_PATTERN

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


LLAMA3 = [*(bytes([b]) for b in range(256)), *EXTRA, b" wor", b" world", b"123", b"'s"]


@pytest.fixture
def llama3(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(LLAMA3)))
    return str(path)


def test_llama3_file_gives_the_ids_of_the_tokenizers_library(llama3):
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ours = TikTokenizer(llama3)
    base = len(LLAMA3)
    assert (ours.vocab_size, ours.bos, ours.eod, ours.eos) == (base + 256, base, base + 1, base + 1)
    literals = ours.special_literals
    assert literals[6:11] == (
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|reserved_special_token_4|>",
        "<|eot_id|>",
        "<|reserved_special_token_5|>",
    )
    assert literals[-1] == "<|reserved_special_token_250|>"
    theirs = TikTokenConverter(llama3, LLAMA3_PATTERN, extra_special_tokens=list(literals)).converted()
    text = "<|begin_of_text|>Hello'S world's  \n\n1234 ll\t½ naïve 你好<|eot_id|><|reserved_special_token_250|>"
    assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.detokenize(ours.tokenize(text)) == text
    named = TikTokenizer(llama3, special_tokens=["<|end_of_text|>", "<|reserved_special_token_0|>", "<|a|>"])
    assert named.special_literals[3] == "<|reserved_special_token_1|>" and named.eod == base


def test_bad_llama3_files(llama3, tmp_path):
    lines = Path(llama3).read_bytes().splitlines(keepends=True)
    Path(llama3).write_bytes(b"".join([*lines, lines[-1]]))
    with pytest.raises(UserError, match=rf"tokenizer.model:{len(lines) + 1}: not a byte string in base64 and the rank"):
        TikTokenizer(llama3)
    Path(llama3).write_bytes(b"".join(lines[:100]))
    with pytest.raises(UserError, match="no token for the byte 100"):
        TikTokenizer(llama3)
    Path(llama3).write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"contain <\|end_of_text\|>, <\|endoftext\|> or </s>"):
        TikTokenizer(llama3, special_tokens=["<a>"])
    with pytest.raises(UserError, match="--tokenizer-type TikTokenizer reads its base64"):
        SentencePieceTokenizer(llama3)


def test_encodings_of_the_package_are_read_only_if_they_are_here(monkeypatch, tmp_path):
    import tiktoken.registry

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"its file r50k_base.tiktoken is not on this machine, and nothing is down"):
        TikTokenizer("tiktoken:r50k_base")
    with pytest.raises(UserError, match=r"no such encoding, but .*cl100k_base"):
        TikTokenizer("tiktoken:cl100k")
    ranks = {bytes([b]): b for b in range(256)} | {b"Hello": 256}
    made = {"name": "here", "pat_str": r"\p{L}+|.", "mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 300}}
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "here", lambda: made)
    ours = TikTokenizer("tiktoken:here")
    assert (ours.vocab_size, ours.eod, ours.tokenize("Hello<|endoftext|>")) == (301, 300, [256, 300])
    with pytest.raises(UserError, match="--tiktoken-pattern: drop it"):
        TikTokenizer("tiktoken:here", "v2")
    config = TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model="tiktoken:here")
    assert config.files == () and build_tokenizer(config).digest == ours.digest
