"""The base class of tokenizers: text to ids and back, special ids, and a digest that identifies the tokenizer."""

import hashlib
import importlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron.core.exceptions import UserError


@dataclass(frozen=True)
class EncodedTexts:
    """Ids of several texts, back to back, and the number of ids of each text."""

    ids: np.ndarray  # int32 [sum(lengths)]
    lengths: np.ndarray  # int64 [texts]


class Tokenizer(ABC):
    """Turns text into token ids and back.

    Ids lie in [0, vocab_size). Special tokens (BOS, EOS) are added to a text only by the families that say so.
    Tokenizers can be pickled and used in forked processes.
    """

    type_name: str
    """Value of --tokenizer-type."""
    vocab_size: int
    """Number of ids, without padding."""
    eod: int
    """The id that ends a document."""
    special_tokens_dict: Mapping[str, int] = MappingProxyType({})
    """Special ids by role, such as eos_token, bos_token, pad_token and unk_token."""
    special_literals: tuple[str, ...] = ()
    """Spellings of the special tokens in text."""
    matches_special_literals: bool = True
    """Whether the spelling of a special token in a text becomes its id; otherwise it is ordinary text."""
    additional_special_tokens_ids: Sequence[int] = ()
    """Ids of the sentinels <extra_id_0>, <extra_id_1>, ..., which stand for masked spans; empty without them."""
    speed_note: str | None = None
    """Why `encode_texts` is slow for this tokenizer; None if it is fast."""

    @property
    def pad(self) -> int | None:
        """The id that pads short sequences; None if the vocabulary has none."""
        return self.special_tokens_dict.get("pad_token")

    @property
    def bos(self) -> int | None:
        """The id that begins a sequence; None if the vocabulary has none."""
        return self.special_tokens_dict.get("bos_token")

    @property
    def eos(self) -> int | None:
        """The id that ends a sequence; None if the vocabulary has none."""
        return self.special_tokens_dict.get("eos_token")

    @property
    def cls(self) -> int | None:
        """The id that begins BERT's input; None if the vocabulary has none."""
        return self.special_tokens_dict.get("cls_token")

    @property
    def sep(self) -> int | None:
        """The id that ends each segment of BERT's input; None if the vocabulary has none."""
        return self.special_tokens_dict.get("sep_token")

    @property
    def mask(self) -> int | None:
        """The id that stands for a masked token; None if the vocabulary has none."""
        return self.special_tokens_dict.get("mask_token")

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text. Raises UserError if the tokenizer cannot encode it."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of ids. Bytes that are not UTF-8 become U+FFFD."""

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Returns the ids that `tokenize` returns for each text, usually faster."""
        return pack_ids([self.tokenize(text) for text in texts])

    def holds_special_literal(self, text: str) -> bool:
        """Whether the text contains the spelling of a special token."""
        pattern = self._literal_pattern
        return pattern is not None and pattern.search(text) is not None

    @cached_property
    def _literal_pattern(self) -> re.Pattern[str] | None:
        return pattern_of_literals(self.special_literals)

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Returns everything that determines the ids, as JSON values."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines the ids. Tokenizers with equal digests give equal ids, special ids
        included."""
        identity = {"type": self.type_name} | self._identity()
        text = json.dumps(identity, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """Identifies the tokenizer in the keys of data caches."""
        return OrderedDict(tokenizer=self.type_name, vocab_size=self.vocab_size, digest=self.digest)


class MegatronTokenizer(Tokenizer):
    """Base class of a script's own tokenizer, for `GPTDatasetConfig(tokenizer=...)`. A subclass defines `vocab_size`,
    `eod`, `tokenize` and `detokenize`. The constructor's paths and options identify it in the keys of data caches."""

    type_name = "script"

    def __init__(self, *tokenizer_paths: str, **tokenizer_options: Any) -> None:
        self._paths, self._options = tokenizer_paths, tokenizer_options

    def _identity(self) -> dict[str, Any]:
        options = {name: str(value) for name, value in self._options.items()}
        return {"class": type(self).__name__, "paths": [str(path) for path in self._paths], "options": options}


def pack_ids(lists: Sequence[Sequence[int]]) -> EncodedTexts:
    """Joins lists of ids into one array."""
    arrays = [np.asarray(ids, np.int32) for ids in lists]
    ids = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
    return EncodedTexts(ids, np.array([array.size for array in arrays], np.int64))


def pattern_of_literals(literals: Sequence[str]) -> re.Pattern[str] | None:
    """Returns a pattern that finds the leftmost of these strings, the longest one if several begin at the same place.
    None without strings."""
    return re.compile(_alternatives(sorted(set(literals)))) if literals else None


def _alternatives(words: Sequence[str]) -> str:
    """Returns a regular expression that branches on the first character, then on the second, and so on (a trie). Its
    speed does not depend on the number of words."""
    by_first = {first: [word[1:] for word in group] for first, group in itertools.groupby(words, lambda word: word[:1])}
    ends = "?" if by_first.pop("", None) else ""
    if not by_first:
        return ""
    branches = [re.escape(first) + _alternatives(rests) for first, rests in by_first.items()]
    return f"(?:{'|'.join(branches)}){ends}" if ends or len(branches) > 1 else branches[0]


def load_library(name: str) -> Any:
    """Imports an optional library (tokenizers, tiktoken). Raises UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"this tokenizer needs the package {name}: pip install {name} (the extra [mlm]); {error}"
        ) from None
