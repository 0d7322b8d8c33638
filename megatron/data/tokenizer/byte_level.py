"""Byte-level BPE for batches of texts: the ids of the `tokenizers` library, many times faster.

Most words of a text were seen before, and their ids come from a cache. Compiled code merges the others. The
`tokenizers` library itself tells which characters are letters, numbers and spaces, so that both cut the same words with
any version of Unicode.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from megatron.data.tokenizer.base import EncodedTexts, load_library
from megatron.data.tokenizer.bpe_kernels import PADDING, Merges, WordTable, encode_words, fill_merges, fill_words
from megatron.data.tokenizer.word_scanners import LETTER, NUMBER, SPACE, cut_cl100k, cut_gpt2

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Regular expressions that have a compiled scanner, with the largest number of digits in a word; 0 is GPT-2's own.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_DIGITS_OF_PATTERN = {
    GPT2_PATTERN: 0,
    _CL100K.format(digits=""): 1,
    _CL100K.format(digits="{1,2}"): 2,
    _CL100K.format(digits="{1,3}"): 3,
}

_CACHED_WORDS = 1 << 19
_LAST_CODE_POINT_OF_A_CLASS = 0x3FFFF  # no letter, number or space is assigned beyond plane 3


class ByteLevelEncoder:
    """Encodes batches of texts with one vocabulary, one list of merges and one way to cut words.

    `vocab` maps tokens, written in GPT-2's printable bytes, to ids; `merges` are pairs of such tokens, best first.
    With `whole_words_first`, a word that is a token gets its id without merging (`ignore_merges` in a tokenizer.json).
    Raises ValueError if a byte that UTF-8 uses has no token, or if a merge names an unknown token.
    """

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Sequence[Sequence[str]],
        pattern: str = GPT2_PATTERN,
        whole_words_first: bool = False,
    ) -> None:
        self._max_digits = MAX_DIGITS_OF_PATTERN[pattern]
        self._classes = classes_of_code_points()
        self._merges = _merge_table(vocab, merges)
        self._whole = _table_of_vocabulary(vocab) if whole_words_first else _word_table(words=1, tails=1, ids=1)
        self._cache: WordTable | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_cache": None}

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Returns the ids of each text. Raises UnicodeEncodeError if a text contains half a surrogate pair."""
        if self._cache is None:
            self._cache = _word_table(_CACHED_WORDS, tails=2 * _CACHED_WORDS, ids=4 * _CACHED_WORDS)
        pieces = [text.encode() for text in texts]
        bounds = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(piece) for piece in pieces], out=bounds[1:])
        pieces.append(bytes(PADDING))
        joined = np.frombuffer(b"".join(pieces), np.uint8)
        ends, counts = self._cut(joined, bounds)
        out, lengths = np.empty(bounds[-1], np.int32), np.empty(len(texts), np.int64)
        total = encode_words(joined, ends, counts, self._merges, self._whole, self._cache, out, lengths)
        return EncodedTexts(out[:total], lengths)

    def _cut(self, text: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of the words, and the number of words of each text."""
        ends, counts = np.empty(bounds[-1], np.int32), np.empty(bounds.size - 1, np.int64)
        if self._max_digits == 0:
            total = cut_gpt2(text, bounds, self._classes, ends, counts)
        else:
            total = cut_cl100k(text, bounds, self._classes, self._max_digits, ends, counts)
        return ends[:total], counts


@functools.cache
def printable_bytes() -> dict[int, str]:
    """Returns GPT-2's character for each byte: a printable byte's own, otherwise the next one from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(0x100 + k) for k, byte in enumerate(hidden)}


@functools.cache
def classes_of_code_points() -> np.ndarray:
    """Returns the class of each code point in the regular expressions of the `tokenizers` library, uint8 [0x110000]:
    LETTER, NUMBER, SPACE or OTHER."""
    tokenizers = load_library("tokenizers")
    points = np.r_[0:0xD800, 0xE000 : _LAST_CODE_POINT_OF_A_CLASS + 1].astype(np.uint32)
    patterns = {LETTER: r"\p{L}", NUMBER: r"\p{N}", SPACE: r"\s"}
    mark = 0xF0000  # and those after it are in no class
    replace = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Replace(tokenizers.Regex(pattern), chr(mark + kind))
            for kind, pattern in patterns.items()
        ]
    )
    marked = replace.normalize_str(points.tobytes().decode("utf-32-le"))
    kinds = np.frombuffer(marked.encode("utf-32-le"), np.uint32)
    classes = np.zeros(0x110000, np.uint8)
    for kind in patterns:
        classes[points[kinds == mark + kind]] = kind
    return classes


def _merge_table(vocab: Mapping[str, int], merges: Sequence[Sequence[str]]) -> Merges:
    byte_ids = np.array([vocab.get(shown, -1) for _, shown in sorted(printable_bytes().items())], np.int32)
    never_in_utf8 = [0xC0, 0xC1, *range(0xF5, 0x100)]
    missing = sorted(set(np.flatnonzero(byte_ids < 0).tolist()) - set(never_in_utf8))
    if missing:
        raise ValueError(f"{len(missing)} bytes have no token, the first is 0x{missing[0]:02x}")
    try:
        pairs = np.array([vocab[left] << 32 | vocab[right] for left, right in merges], np.int64)
        results = np.array([vocab[left + right] for left, right in merges], np.int32)
    except KeyError as error:
        raise ValueError(f"the merges name {error.args[0]!r}, which is not a token") from None
    slots = _power_of_two(4 * len(merges))
    table = Merges(np.full(slots, -1, np.int64), np.zeros(slots, np.int32), np.zeros(slots, np.int32), byte_ids)
    fill_merges(table, pairs, results)
    return table


def _table_of_vocabulary(vocab: Mapping[str, int]) -> WordTable:
    """Returns a table in which each token of printable bytes is a whole word."""
    byte_of = {shown: byte for byte, shown in printable_bytes().items()}
    words = {
        bytes(byte_of[c] for c in token): i for token, i in vocab.items() if token and set(token) <= byte_of.keys()
    }
    bounds = np.zeros(len(words) + 1, np.int64)
    np.cumsum([len(word) for word in words], out=bounds[1:])
    table = _word_table(len(words), tails=int(bounds[-1]), ids=1)
    text = np.frombuffer(b"".join(words) + bytes(PADDING), np.uint8)
    fill_words(table, text, bounds, np.array(list(words.values()), np.int32))
    return table


def _word_table(words: int, tails: int, ids: int) -> WordTable:
    slots = _power_of_two(2 * words + 2)
    return WordTable(
        np.zeros((slots, 4), np.uint64), np.zeros(tails + 1, np.uint64), np.zeros(ids, np.int32), np.zeros(3, np.int64)
    )


def _power_of_two(at_least: int) -> int:
    return 1 << max(1, at_least - 1).bit_length()
