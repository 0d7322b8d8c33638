"""What a tokenizer is to the rest of the project: text to ids and back, its special ids, and who it is."""

import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.training.tokenizer.byte_level import EncodedTexts


class Tokenizer(ABC):
    """Turns text into token ids and back.

    Ids lie in [0, vocab_size). Special tokens (BOS, EOS) are not added to text unless the family says so. Objects can
    be pickled, and used in forked processes.
    """

    type_name: str
    """The word that --tokenizer-type knows this family by."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, without padding."""

    @property
    @abstractmethod
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def pad(self) -> int | None:
        """The id that fills up short sequences; None if the vocabulary has none."""
        return self.special_tokens_dict.get("pad_token")

    @property
    def bos(self) -> int | None:
        """The id that begins a sequence; None if the vocabulary has none."""
        return self.special_tokens_dict.get("bos_token")

    @property
    @abstractmethod
    def special_tokens_dict(self) -> dict[str, int]:
        """Special ids by role: eos_token, bos_token, pad_token, unk_token, ..."""

    @property
    def special_literals(self) -> tuple[str, ...]:
        """How special tokens are spelled in text."""
        return ()

    @property
    def matches_special_literals(self) -> bool:
        """Whether such a spelling becomes the special token; otherwise it is text like any other."""
        return True

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of a text. UserError when the family cannot take it."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Ids of many texts: for every one what `tokenize` gives, faster."""
        return pack_ids([self.tokenize(text) for text in texts])

    @property
    def speed_note(self) -> str | None:
        """Why `encode_texts` takes a slow way; None when it does not."""
        return None

    def holds_special_literal(self, text: str) -> bool:
        """Whether the text spells out a special token."""
        pattern = self._literal_pattern
        return pattern is not None and pattern.search(text) is not None

    @property
    def _literal_pattern(self) -> re.Pattern[str] | None:
        if "_literal_pattern_made" not in self.__dict__:
            self.__dict__["_literal_pattern_made"] = pattern_of_literals(self.special_literals)
        return self.__dict__["_literal_pattern_made"]

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """All that determines ids, as JSON."""

    @property
    def digest(self) -> str:
        """sha256 over all that determines ids: tokenizers with one digest give the same ids, special ids included."""
        if "_digest" not in self.__dict__:
            identity = {"type": self.type_name} | self._identity()
            text = json.dumps(identity, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
            self.__dict__["_digest"] = hashlib.sha256(text.encode()).hexdigest()
        return self.__dict__["_digest"]

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """What keys caches of data made with this tokenizer."""
        return OrderedDict(tokenizer=self.type_name, vocab_size=self.vocab_size, digest=self.digest)


def pack_ids(lists: Sequence[Sequence[int]]) -> EncodedTexts:
    """Lists of ids as one array."""
    arrays = [np.asarray(ids, np.int32) for ids in lists]
    ids = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
    return EncodedTexts(ids, np.array([array.size for array in arrays], np.int64))


def pattern_of_literals(literals: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern that finds the leftmost of these strings, the longest where several start; None if there are none."""
    return re.compile(_alternatives(sorted(set(literals)))) if literals else None


def _alternatives(words: Sequence[str]) -> str:
    """Words by first character, then by second, ...: with a thousand words as quick as with one."""
    by_first = {first: [word[1:] for word in group] for first, group in itertools.groupby(words, lambda word: word[:1])}
    ends = "?" if by_first.pop("", None) else ""
    if not by_first:
        return ""
    branches = [re.escape(first) + _alternatives(rests) for first, rests in by_first.items()]
    return f"(?:{'|'.join(branches)}){ends}" if ends or len(branches) > 1 else branches[0]
