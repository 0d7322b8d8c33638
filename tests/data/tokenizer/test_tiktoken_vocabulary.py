"""megatron/data/tokenizer/tiktoken_vocabulary.py: Llama 3's tokenizer.model, and tiktoken's own encodings."""

import base64
from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.sentencepiece import SentencePieceTokenizer
from megatron.data.tokenizer.tiktoken import TikTokenizer
from megatron.data.tokenizer.tiktoken_vocabulary import LLAMA3_PATTERN

EXTRA = [b"He", b"ll", b"Hell", b"Hello", b" w", b"12", b"\n\n", b"or", b"ld", b"wor"]
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
    assert ours.detokenize([256, 280, 300]) == "Hello<|endoftext|>"  # 280 has no token, as 100256 of cl100k_base
    with pytest.raises(UserError, match="--tiktoken-pattern: drop it"):
        TikTokenizer("tiktoken:here", "v2")
    config = TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model="tiktoken:here")
    assert config.files == () and build_tokenizer(config).digest == ours.digest
