"""Tokenizers of conversations, and texts that are never written."""

from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.generation import banned_sequences, chat_tokenizer
from megatron.data.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.data.tokenizer.null import NullTokenizer

FOLDER = Path(__file__).parents[2] / "data/golden/corpus/hf"


def test_only_hugging_face_tokenizers_chat(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    flags = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(FOLDER))
    tokenizer = chat_tokenizer(flags, str(tmp_path / "chat.jinja"))
    assert tokenizer.detokenize(tokenizer.encode_prompt([{"role": "user", "content": "Hi"}])) == "Hi|"
    with pytest.raises(UserError, match="has no chat template; give --chat-template FILE"):
        chat_tokenizer(flags, None)
    with pytest.raises(UserError, match="a NullTokenizer has no chat template"):
        chat_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9), None)


def test_texts_are_banned_alone_and_after_a_blank() -> None:
    tokenizer = HuggingFaceTokenizer(str(FOLDER))
    found = banned_sequences(tokenizer, ["now", "The"])
    assert {tokenizer.detokenize(ids) for ids in found} == {"now", " now", "The", " The"}
    assert banned_sequences(NullTokenizer(9), ["1 2", "1 2"]) == ((1, 2),)
    with pytest.raises(UserError, match="NullTokenizer reads ids"):
        banned_sequences(NullTokenizer(9), ["word"])
