"""BertWordPieceLowerCase and BertWordPieceCase: words cut into the pieces of a local vocab.txt."""

import unicodedata
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.base import Tokenizer, load_library

MAX_CHARACTERS_OF_WORD = 200
_UNKNOWN = "[UNK]"
_TOKEN_OF_ROLE = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
    "unk_token": _UNKNOWN,
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
}
_ADDED = ("[BOS]", "[EOS]")

# Blocks of ideographs, each of which is a separate word; kana and Hangul are treated like other letters.
_IDEOGRAPHS = (
    range(0x3400, 0x4DC0),
    range(0x4E00, 0xA000),
    range(0xF900, 0xFB00),
    range(0x20000, 0x2A6E0),
    range(0x2A700, 0x2CEB0),
    range(0x2F800, 0x2FA20),
)
_CACHED_WORDS = 1 << 17
_LONGEST_CACHED_WORD = 40


class BertWordPieceTokenizer(Tokenizer):
    """WordPiece as in BERT (Devlin et al. 2018): cut at blanks, punctuation and ideographs, longest pieces first.

    Each line of the vocabulary is a token; its id is the number of lines before it. [BOS], [EOS] and <extra_id_0> to
    <extra_id_{vocab_extra_ids - 1}> come after the file's lines, unless the file has them. A text gets no [CLS] or
    [SEP]; their spelling in text is ordinary characters. [EOS] ends a document.

    Words are those of BERT's own Python code, with the Unicode tables of this Python. The BertNormalizer of the
    `tokenizers` library has older tables and lower-cases letters one by one, so that a Greek word in capitals ends in
    another letter.
    """

    matches_special_literals = False

    def __init__(self, vocab_file: str, lower_case: bool, vocab_extra_ids: int = 0) -> None:
        self.type_name = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
        self._lower_case = lower_case
        self._tokens = _read_vocab(Path(vocab_file))
        self._ids = {token: i for i, token in enumerate(self._tokens) if token}
        self._add(_ADDED)
        self._identity_of_ids = {"vocab": dict(self._ids), "size": len(self._tokens)}
        extra = tuple(f"<extra_id_{k}>" for k in range(vocab_extra_ids))
        self._add(extra)
        self.vocab_size, self.eod = len(self._tokens), self._ids["[EOS]"]
        self.special_tokens_dict = {role: self._ids[token] for role, token in _TOKEN_OF_ROLE.items()}
        self.special_literals = (*_TOKEN_OF_ROLE.values(), *extra)
        self.additional_special_tokens_ids = [self._ids[token] for token in extra]
        self._pieces = _PiecesOfWords(self._ids)

    def _add(self, tokens: Sequence[str]) -> None:
        for token in tokens:
            if token not in self._ids:
                self._ids[token] = len(self._tokens)
                self._tokens.append(token)

    @property
    def vocab(self) -> dict[str, int]:
        """Ids by token. A blank line of the file has an id but no token."""
        return dict(self._ids)

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Tokens by id, in order of id."""
        return dict(enumerate(self._tokens))

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        words = cut_words(text, self._lower_case)
        return list(chain.from_iterable(map(self._pieces.__getitem__, words)))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Joins pieces, and puts a blank between words. Case, accents and spacing of the original text are lost."""
        return " ".join(self._tokens[i] for i in ids).replace(" ##", "")

    def _identity(self) -> dict[str, Any]:
        """Leaves out <extra_id_i>. Texts never contain these tokens, and a T5 may read data that was prepared without
        them."""
        return self._identity_of_ids


class _PiecesOfWords(dict[str, list[int]]):
    """Maps words to the ids of their pieces. Caches words, up to a limit."""

    def __init__(self, vocab: dict[str, int]) -> None:
        super().__init__()
        self._unknown = [vocab[_UNKNOWN]]
        self._library = load_library("tokenizers").models.WordPiece(
            vocab, unk_token=_UNKNOWN, max_input_chars_per_word=MAX_CHARACTERS_OF_WORD
        )

    def __missing__(self, word: str) -> list[int]:
        if len(word) > MAX_CHARACTERS_OF_WORD:
            return self._unknown
        ids = [token.id for token in self._library.tokenize(word)]
        if len(word) <= _LONGEST_CACHED_WORD:
            if len(self) >= _CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def __reduce__(self) -> tuple[Any, ...]:
        return _PiecesOfWords._of, (self._unknown, self._library)

    @classmethod
    def _of(cls, unknown: list[int], library: Any) -> "_PiecesOfWords":
        made = cls.__new__(cls)
        made._unknown, made._library = unknown, library
        return made


class _EachCharacter(dict[int, str]):
    """A table for str.translate, whose entries are computed at their first use."""

    def __init__(self, replace: Callable[[str], str]) -> None:
        super().__init__()
        self._replace = replace

    def __missing__(self, point: int) -> str:
        self[point] = self._replace(chr(point))
        return self[point]


def _clean(character: str) -> str:
    """Removes control and format characters and U+FFFD, unifies blanks, and puts blanks around ideographs."""
    category = unicodedata.category(character)
    if character in "\t\n\r" or category == "Zs":
        return " "
    if character == "\ufffd" or category in ("Cc", "Cf"):
        return ""
    return f" {character} " if any(ord(character) in block for block in _IDEOGRAPHS) else character


def _part_punctuation(character: str) -> str:
    """Puts blanks around punctuation and around ASCII symbols ($, +, ^, ...)."""
    sign = character.isascii() and character.isprintable() and not character.isalnum() and character != " "
    return f" {character} " if sign or unicodedata.category(character).startswith("P") else character


def _drop_mark(character: str) -> str:
    return "" if unicodedata.category(character) == "Mn" else character


_CLEANED = _EachCharacter(_clean)
_PUNCTUATION_PARTED = _EachCharacter(_part_punctuation)
_WITHOUT_MARKS = _EachCharacter(_drop_mark)


def cut_words(text: str, lower_case: bool) -> list[str]:
    """Cuts a text into words by BERT's basic tokenization. `lower_case` also removes accents."""
    text = text.translate(_CLEANED)
    if lower_case:
        text = text.lower()
        if not text.isascii():
            text = unicodedata.normalize("NFD", text).translate(_WITHOUT_MARKS)
    return text.translate(_PUNCTUATION_PARTED).split()


def _read_vocab(path: Path) -> list[str]:
    """Returns the lines of the file without surrounding blanks."""
    try:
        lines = path.read_text("utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise UserError(f"--vocab-file {path}: {error.strerror}; BERT's tokenizers read a vocab.txt") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--vocab-file {path}: not UTF-8: {error}") from None
    tokens = [line.strip() for line in lines]
    first_line: dict[str, int] = {}
    for number, token in enumerate(tokens, 1):
        if token and first_line.setdefault(token, number) != number:
            raise UserError(f"--vocab-file {path}:{number}: {token!r} is also in line {first_line[token]}")
    missing = [token for token in _TOKEN_OF_ROLE.values() if token not in first_line and token not in _ADDED]
    if missing:
        raise UserError(
            f"--vocab-file {path}: no {', '.join(missing)} among its {len(tokens)} lines; a vocab.txt of BERT has one "
            "token per line, and these must be there"
        )
    return tokens
