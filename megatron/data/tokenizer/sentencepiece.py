"""SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer: a .model file, encoded by `sentencepiece`."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.base import EncodedTexts, Tokenizer, load_library, pack_ids
from megatron.data.tokenizer.tiktoken_vocabulary import is_base64_and_ranks

_ADDED_TOKENS = {"cls_token": "<CLS>", "sep_token": "<SEP>", "eod_token": "<EOD>", "mask_token": "<MASK>"}
_ADDED_IF_ABSENT = {"pad_token": "<PAD>", "bos_token": "<BOS>", "eos_token": "<EOS>"}


class SentencePieceTokenizer(Tokenizer):
    """Ids of a SentencePiece model (Kudo and Richardson 2018). The end-of-sentence piece ends a document.

    `type_name` is SentencePieceTokenizer, GPTSentencePieceTokenizer (the same ids) or Llama2Tokenizer. With `adds_bos`,
    each text begins with the model's BOS, as in older releases of Llama2Tokenizer.

    With `adds_special_tokens`, as in older releases of SentencePieceTokenizer, the tokens <CLS>, <SEP>, <EOD>, <MASK>,
    then <PAD>, <BOS>, <EOS> where the model has no such piece, and <extra_id_i> follow the model's pieces. <EOD> ends a
    document, and the spellings of all these tokens in a text become the tokens.
    """

    def __init__(
        self,
        model: str,
        type_name: str = "SentencePieceTokenizer",
        *,
        adds_special_tokens: bool = False,
        extra_ids: int = 0,
        adds_bos: bool = False,
        keeps_blanks: bool = False,
    ) -> None:
        self.type_name = type_name
        self._model = _load_model(Path(model))
        if keeps_blanks and self._model.encode("x  y") == self._model.encode("x y"):
            raise UserError(
                "--no-tokenizer-sentencepiece-ignore-extra-whitespaces: this model joins runs of blanks; train one "
                f"that keeps them (remove_extra_whitespaces=false), or leave the flag out: {model}"
            )
        ids = {role: getattr(self._model, f"{role[:3]}_id")() for role in ("unk_token", *_ADDED_IF_ABSENT)}
        self._roles = {role: index for role, index in ids.items() if index >= 0}
        self._added: dict[str, int] = {}
        if adds_special_tokens:
            self._add_special_tokens(extra_ids)
        elif "eos_token" not in self._roles:
            raise UserError(
                f"--tokenizer-model {model}: the model has no end-of-sentence piece, so nothing ends a document; "
                "--tokenizer-sentencepiece-legacy adds <EOD>"
            )
        if adds_bos and "bos_token" not in self._roles:
            raise UserError(f"--tokenizer-model {model}: --legacy-tokenizer begins each text with BOS; it has no BOS")
        self._prefix = [self._roles["bos_token"]] if adds_bos else []
        size = self._model.get_piece_size()
        self.vocab_size = size + len(self._added)
        self.eod = self._roles.get("eod_token", self._roles["eos_token"])
        self.special_tokens_dict = {role: index for role, index in self._roles.items() if role != "eod_token"}
        self.matches_special_literals = adds_special_tokens
        controls = map(self._model.id_to_piece, filter(self._model.is_control, range(size)))
        self.special_literals = tuple(self._literals if adds_special_tokens else controls)
        if adds_special_tokens:
            self.speed_note = "--tokenizer-sentencepiece-legacy looks for special tokens in each text"

    def _add_special_tokens(self, extra_ids: int) -> None:
        self._literals: dict[str, int] = {}
        for role, token in (_ADDED_TOKENS | _ADDED_IF_ABSENT).items():
            if role in self._roles:
                self._literals[self._model.id_to_piece(self._roles[role])] = self._roles[role]
            else:
                self._roles[role] = self._add(token)
        self.additional_special_tokens_ids = [self._add(f"<extra_id_{i}>") for i in range(extra_ids)]

    def _add(self, token: str) -> int:
        index = self._model.piece_to_id(token)
        if self._model.id_to_piece(index) != token:  # unknown: a new id after those of the model
            index = self._added.setdefault(token, self._model.get_piece_size() + len(self._added))
        self._literals[token] = index
        return index

    @property
    def cls(self) -> int:
        """Id of <CLS>; -1 without `adds_special_tokens`, and so for `sep` and `mask`."""
        return self._roles.get("cls_token", -1)

    @property
    def sep(self) -> int:
        """Id of <SEP>."""
        return self._roles.get("sep_token", -1)

    @property
    def mask(self) -> int:
        """Id of <MASK>."""
        return self._roles.get("mask_token", -1)

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Spelling of each id."""
        pieces = {i: self._model.id_to_piece(i) for i in range(self._model.get_piece_size())}
        return pieces | {index: token for token, index in self._added.items()}

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Id of each spelling."""
        return {token: index for index, token in self.inv_vocab.items()}

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        if not self.matches_special_literals:
            return self._prefix + self._model.encode(text)
        ids: list[int] = []
        start = 0
        assert self._literal_pattern is not None
        for match in self._literal_pattern.finditer(text):
            ids += self._model.encode(text[start : match.start()])
            ids.append(self._literals[match.group()])
            start = match.end()
        return ids + self._model.encode(text[start:])

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        size = self._model.get_piece_size()
        parts: list[str] = []
        start = 0
        for position, index in enumerate([*ids, size]):
            if index >= size:
                if start < position:
                    parts.append(self._model.decode(list(ids[start:position])))
                if position < len(ids):
                    parts.append(self.inv_vocab[index])
                start = position + 1
        return " ".join(parts)

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Returns the ids of many texts."""
        if self.matches_special_literals:
            return pack_ids([self.tokenize(text) for text in texts])
        return pack_ids([self._prefix + ids for ids in self._model.encode(list(texts), num_threads=1)])

    def _identity(self) -> dict[str, object]:
        """Leaves out the <extra_id_i> tokens: data for T5 may be prepared before they are added."""
        extra = {f"<extra_id_{i}>" for i in range(len(self.additional_special_tokens_ids))}
        return {
            "type": "SentencePieceTokenizer",  # equal models give equal ids under each of the three names
            "model": hashlib.sha256(self._model.serialized_model_proto()).hexdigest(),
            "added": {token: index for token, index in self._added.items() if token not in extra},
            "matches_special_literals": self.matches_special_literals,
            "prefix": self._prefix,
        }


def _load_model(path: Path) -> Any:
    library = load_library("sentencepiece")
    try:
        proto = path.read_bytes()
    except OSError as error:
        raise UserError(f"--tokenizer-model {path}: {error.strerror}; a SentencePiece .model file is read") from None
    try:
        return library.SentencePieceProcessor(model_proto=proto)
    except RuntimeError:
        other = "; --tokenizer-type TikTokenizer reads its base64 and ranks" if is_base64_and_ranks(proto[:200]) else ""
        raise UserError(f"--tokenizer-model {path}: not a SentencePiece .model file{other}") from None
