"""The fast path for each tokenizer.json that is byte-level BPE: compiled kernels instead of the library, several times
as fast. They merge by the merges file. tiktoken's way gives other ids where a prefix of a merge cannot be reached."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron.data.tokenizer.base import EncodedTexts, pattern_of_literals
from megatron.data.tokenizer.byte_level import GPT2_PATTERN, MAX_DIGITS_OF_PATTERN, ByteLevelEncoder

# Normalizers that leave ASCII as it is.
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


def why_not_fast(state: Mapping[str, Any]) -> str | None:
    """Returns why `ByteLevelEncoder` cannot encode for a tokenizer.json; None if it can."""
    model = state["model"]
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not byte-level BPE"
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            return f"its BPE model sets {option}"
    normalizer = state["normalizer"]
    if normalizer is not None and normalizer["type"] not in _UNICODE_FORMS:
        return f"its normalizer is {normalizer['type']}"
    if _pattern_of(state["pre_tokenizer"]) is None:
        return "its pre-tokenizer has no compiled scanner"
    if any(token["single_word"] or token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return "an added token matches the blanks around it, or only whole words"
    normalized = {token["normalized"] for token in state["added_tokens"]}
    if len(normalized) > 1 or (normalizer is not None and True in normalized):
        return "some of its added tokens are matched after the others, in normalized text"
    return None


def _pattern_of(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """Returns the regular expression that cuts words; None if it has no compiled scanner."""
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "ByteLevel":
        return GPT2_PATTERN if pre_tokenizer.get("use_regex", True) else None
    parts = pre_tokenizer.get("pretokenizers", [])
    if pre_tokenizer["type"] != "Sequence" or [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    split, byte_level = parts
    pattern = split["pattern"].get("Regex")
    plain = split["behavior"] == "Isolated" and not split["invert"]
    if byte_level["add_prefix_space"] or byte_level.get("use_regex", True) or not plain:
        return None
    return pattern if pattern in MAX_DIGITS_OF_PATTERN else None


class HuggingFaceFastPath:
    """Encodes texts with a `ByteLevelEncoder`. A text is cut at its added tokens first."""

    def __init__(self, library: Any, state: Mapping[str, Any]) -> None:
        model = state["model"]
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        pattern = _pattern_of(state["pre_tokenizer"])
        assert pattern is not None
        self._encoder = ByteLevelEncoder(model["vocab"], merges, pattern, bool(model.get("ignore_merges")))
        self._id_of_added = {token["content"]: token["id"] for token in state["added_tokens"] if token["content"]}
        self._added: re.Pattern[str] | None = pattern_of_literals(list(self._id_of_added))
        self._normalizer = library.normalizer
        self._add_prefix_space = state["pre_tokenizer"].get("add_prefix_space", False)

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Returns the ids of the texts, equal to the library's."""
        plain: list[str] = []  # stretches of text without added tokens
        cut_texts: dict[int, list[int]] = {}  # text -> its parts: index into `plain`, or ~id of an added token
        for k, text in enumerate(texts):
            if self._added is None or self._added.search(text) is None:
                plain.append(self._prepared(text))
            else:
                cut_texts[k] = self._cut(text, plain)
        encoded = self._encoder.encode(plain)
        return self._put_together(len(texts), encoded, cut_texts) if cut_texts else encoded

    def _cut(self, text: str, plain: list[str]) -> list[int]:
        assert self._added is not None
        parts = []
        at = 0
        for match in self._added.finditer(text):
            if match.start() > at:
                parts.append(len(plain))
                plain.append(self._prepared(text[at : match.start()]))
            parts.append(~self._id_of_added[match.group()])
            at = match.end()
        if at < len(text):
            parts.append(len(plain))
            plain.append(self._prepared(text[at:]))
        return parts

    def _prepared(self, text: str) -> str:
        if self._normalizer is not None and not text.isascii():
            text = self._normalizer.normalize_str(text)
        if self._add_prefix_space and text and not text.startswith(" "):
            text = " " + text
        return text

    def _put_together(self, count: int, encoded: EncodedTexts, cut_texts: Mapping[int, list[int]]) -> EncodedTexts:
        ends = np.cumsum(encoded.lengths)
        pieces: list[np.ndarray] = []
        lengths = np.zeros(count, np.int64)
        following = 0  # the next entry of `plain`
        for k in range(count):
            for part in cut_texts.get(k, [following]):
                if part < 0:
                    piece = np.array([~part], np.int32)
                else:
                    piece = encoded.ids[ends[part] - encoded.lengths[part] : ends[part]]
                    following = part + 1
                pieces.append(piece)
                lengths[k] += piece.size
        return EncodedTexts(np.concatenate(pieces), lengths)
