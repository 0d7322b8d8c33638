"""Which tokenizer.json files take the fast path."""

from typing import Any

import pytest

from megatron.data.tokenizer.huggingface_fast import why_not_fast


def state(**changes: Any) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return {"model": {"type": "BPE"}, "normalizer": None, "pre_tokenizer": byte_level, "added_tokens": []} | changes


def added(**changes: bool) -> dict[str, bool]:
    return {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False} | changes


def test_byte_level_bpe_is_fast() -> None:
    assert why_not_fast(state()) is None
    assert why_not_fast(state(normalizer={"type": "NFC"}, added_tokens=[added()])) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"type": "Unigram"}}, "its model is Unigram"),
        ({"model": {"type": "BPE", "byte_fallback": True}}, "byte_fallback"),
        ({"normalizer": {"type": "Lowercase"}}, "its normalizer is Lowercase"),
        ({"pre_tokenizer": None}, "pre-tokenizer"),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "pre-tokenizer"),
        ({"added_tokens": [added(lstrip=True)]}, "blanks around it"),
        ({"added_tokens": [added(), added(normalized=True)]}, "normalized text"),
        ({"added_tokens": [added(normalized=True)], "normalizer": {"type": "NFC"}}, "normalized text"),
    ],
)
def test_others_are_slow_and_say_why(changes: dict[str, Any], reason: str) -> None:
    assert reason in (why_not_fast(state(**changes)) or "")
