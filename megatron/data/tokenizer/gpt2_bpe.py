"""GPT2BPETokenizer: byte-level BPE from a local vocab.json and merges.txt."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json
from megatron.core.utils.warn import warn_on_first_rank
from megatron.data.tokenizer.base import EncodedTexts, Tokenizer, load_library
from megatron.data.tokenizer.byte_level import ByteLevelEncoder

END_OF_TEXT = "<|endoftext|>"


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's tokenizer (Radford et al. 2019) with any vocabulary and merges of its kind.

    Special tokens are never matched in text: a literal `<|endoftext|>` is ordinary characters. Ids are those of
    `ByteLevelBPETokenizer(vocab, merges)` in the `tokenizers` library.
    """

    type_name = "GPT2BPETokenizer"
    special_literals = (END_OF_TEXT,)
    matches_special_literals = False

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        self._vocab = _read_vocab(Path(vocab_file))
        self._merges = _read_merges(Path(merge_file))
        if END_OF_TEXT not in self._vocab:
            raise UserError(f"--vocab-file {vocab_file}: no {END_OF_TEXT!r}, which ends a document")
        self.vocab_size, self.eod = max(self._vocab.values()) + 1, self._vocab[END_OF_TEXT]
        self.special_tokens_dict = {"eos_token": self.eod, "bos_token": self.eod}
        _warn_of_missing_merges(self._vocab, self._merges, merge_file)
        try:
            self._encoder = ByteLevelEncoder(self._vocab, self._merges)
        except ValueError as error:
            raise UserError(f"--vocab-file {vocab_file} with --merge-file {merge_file}: {error}") from None
        tokenizers = load_library("tokenizers")
        self._library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=self._vocab, merges=self._merges))
        self._library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._library.decoder = tokenizers.decoders.ByteLevel()

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        return self._library.encode(text).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        return self._library.decode(list(ids), skip_special_tokens=False)

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Returns the ids of many texts."""
        return self._encoder.encode(texts)

    def _identity(self) -> dict[str, Any]:
        return {"vocab": self._vocab, "merges": self._merges}


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        vocab = parse_json(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"--vocab-file {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--vocab-file {path}: not JSON in UTF-8: {error}") from None
    if not isinstance(vocab, dict) or not vocab or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise UserError(f"--vocab-file {path}: not a JSON object from tokens to ids")
    largest = max(vocab, key=lambda token: vocab[token])
    if vocab[largest] >= _MOST_IDS:
        raise UserError(f"--vocab-file {path}: the id {vocab[largest]} of {largest!r} is larger than {_MOST_IDS - 1}")
    if len(set(vocab.values())) < len(vocab):
        first, second, shared = _same_id(vocab)
        raise UserError(f"--vocab-file {path}: {first!r} and {second!r} have the same id {shared}")
    return vocab


_MOST_IDS = 1 << 31
"""Ids are int32 in files of tokens, at most."""


def _same_id(vocab: Mapping[str, int]) -> tuple[str, str, int]:
    """Returns two tokens with one id, and the id."""
    holders: dict[int, str] = {}
    for token, number in vocab.items():
        if number in holders:
            return holders[number], token, number
        holders[number] = token
    raise AssertionError("each token has an id of its own")


def _warn_of_missing_merges(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], merge_file: str) -> None:
    """Warns if no merge makes some of the tokens, which happens if the file was cut off. Special tokens (in brackets)
    are never made by merges."""
    made = {left + right for left, right in merges}
    unmade = [t for t in vocab if len(t) > 1 and t not in made and (t[0], t[-1]) not in (("<", ">"), ("[", "]"))]
    if unmade:
        warn_on_first_rank(
            f"--merge-file {merge_file}: {len(unmade)} tokens of the vocabulary are made by no merge, the first is "
            f"{unmade[0]!r}; no text will have them; was the file cut off?"
        )


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text("utf-8").split("\n")
    except OSError as error:
        raise UserError(f"--merge-file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--merge-file {path}: not UTF-8: {error}") from None
    merges = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if line.startswith("#version") or not line:
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            shown = line if len(line) <= 40 else f"{line[:40]}..."  # a vocabulary is one line of a megabyte
            hint = "; is it the vocabulary, which --vocab-file names?" if line.startswith("{") else ""
            raise UserError(f"--merge-file {path}:{number}: {shown!r} is not two tokens separated by one blank{hint}")
        merges.append((parts[0], parts[1]))
    return merges
