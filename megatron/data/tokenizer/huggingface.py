"""HuggingFaceTokenizer: a tokenizer.json, or a folder with one, read by the `tokenizers` library alone."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json
from megatron.data.tokenizer.base import EncodedTexts, Tokenizer, load_library, pack_ids
from megatron.data.tokenizer.huggingface_fast import HuggingFaceFastPath, why_not_fast

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face tokenizer. It adds the template's BOS and EOS only with `include_special_tokens`.

    Added tokens, including special ones, are matched in text, as in the library. `eod` is the EOS token of
    tokenizer_config.json or special_tokens_map.json. EOS and SEP replace each other if one is missing, and so do BOS
    and CLS.

    <extra_id_0>, <extra_id_1>, ... are T5's sentinels. With `vocab_extra_ids`, those up to this number that the folder
    lacks get ids after its vocabulary; they are not matched in text, so data that was prepared without them fits.
    """

    type_name = "HuggingFaceTokenizer"

    def __init__(self, path: str, include_special_tokens: bool = False, vocab_extra_ids: int = 0) -> None:
        files = _find_files(Path(path))
        self._include_special_tokens = include_special_tokens
        self._library = _load_library(files)
        special = _register_special_tokens(self._library, files)
        self._special = {role: self._library.token_to_id(token) for role, token in special.items()}
        self._eod = self._end_of_document(files)
        self._state = json.loads(self._library.to_str())
        self._fast, self._speed_note = self._make_fast()
        self._own_size = self._size_of_library()
        self._sentinels, self._added = self._make_sentinels(vocab_extra_ids)

    def _size_of_library(self) -> int:
        vocab = self._library.get_vocab(with_added_tokens=True)
        return max(len(vocab), max(vocab.values()) + 1)

    def _make_sentinels(self, count: int) -> tuple[list[int], dict[int, str]]:
        """Returns the ids of <extra_id_0>, <extra_id_1>, ..., and the spellings of those that the folder lacks."""
        sentinels: list[int] = []
        added: dict[int, str] = {}
        for token in map("<extra_id_{}>".format, itertools.count()):
            found = self._library.token_to_id(token)
            if found is None:
                if len(sentinels) >= count:
                    return sentinels, added
                found = self._own_size + len(added)
                added[found] = token
            sentinels.append(found)
        raise AssertionError("count does not end")

    def _end_of_document(self, files: "_Files") -> int:
        if "eos_token" in self._special:
            return self._special["eos_token"]
        known = [token for token in _USUAL_ENDS if self._library.token_to_id(token) is not None]
        if len(known) == 1:
            self._special["eos_token"] = self._library.token_to_id(known[0])
            return self._special["eos_token"]
        raise UserError(
            f"--tokenizer-model {files.tokenizer}: nothing says which token ends a document; put a "
            f'tokenizer_config.json with {{"eos_token": "..."}} beside it'
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, without padding."""
        return self._own_size + len(self._added)

    @property
    def vocab(self) -> dict[str, int]:
        """Ids by token."""
        return self._library.get_vocab(with_added_tokens=True) | {token: i for i, token in self._added.items()}

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Tokens by id, in order of id."""
        return dict(sorted((i, token) for token, i in self.vocab.items()))

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of the sentinels <extra_id_0>, <extra_id_1>, ...; empty without them."""
        return list(self._sentinels)

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        return self._eod

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        """Special ids by role."""
        return dict(self._special)

    @property
    def special_literals(self) -> tuple[str, ...]:
        """Spellings of the special tokens in text."""
        return tuple(token["content"] for token in self._state["added_tokens"] if token["special"])

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        return self._library.encode(text, add_special_tokens=self._include_special_tokens).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        parts = []
        for added, group in itertools.groupby(ids, self._added.get):
            parts += [self._library.decode(list(group), skip_special_tokens=False)] if added is None else [added]
        return "".join(parts)

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Returns the ids of many texts."""
        if self._fast is not None:
            return self._fast.encode(texts)
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=self._include_special_tokens)
        return pack_ids([encoding.ids for encoding in encodings])

    @property
    def speed_note(self) -> str | None:
        """Why `encode_texts` is slow for this tokenizer; None if it is fast."""
        return self._speed_note

    def _make_fast(self) -> tuple[HuggingFaceFastPath | None, str | None]:
        if self._include_special_tokens and self._library.num_special_tokens_to_add(is_pair=False) > 0:
            return None, "--tokenizer-hf-include-special-tokens adds tokens to every text"
        reason = why_not_fast(self._state)
        if reason is None:
            try:
                return HuggingFaceFastPath(self._library, self._state), None
            except ValueError as error:
                reason = str(error)
        return None, reason

    def _identity(self) -> dict[str, Any]:
        """Leaves out the added <extra_id_i>."""
        state = {key: value for key, value in self._state.items() if key not in ("truncation", "padding", "decoder")}
        return {"state": state, "special": self._special, "include_special_tokens": self._include_special_tokens}


@dataclass(frozen=True)
class _Files:
    tokenizer: Path
    config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]


def _find_files(path: Path) -> _Files:
    if not path.exists():
        raise UserError(
            f"--tokenizer-model {path}: no such folder or file; HuggingFaceTokenizer reads a local folder with a "
            "tokenizer.json, or such a file (nothing is downloaded)"
        )
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"--tokenizer-model {path}: no tokenizer.json in it; {_what_slow_files_need(path)}")
    folder = file.parent
    return _Files(file, _read_json(folder / "tokenizer_config.json"), _read_json(folder / "special_tokens_map.json"))


def _what_slow_files_need(folder: Path) -> str:
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return (
            f"--tokenizer-type GPT2BPETokenizer --vocab-file {folder / 'vocab.json'} "
            f"--merge-file {folder / 'merges.txt'} reads what is there"
        )
    return (
        "a folder with only a slow tokenizer is converted by transformers.AutoTokenizer.from_pretrained(folder)"
        ".save_pretrained(folder)"
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        content = parse_json(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON in UTF-8: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content


def _load_library(files: _Files) -> Any:
    try:
        library = load_library("tokenizers").Tokenizer.from_file(str(files.tokenizer))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"--tokenizer-model {files.tokenizer}: not a tokenizer.json: {error}") from None
    library.no_truncation()
    library.no_padding()
    return library


def _register_special_tokens(library: Any, files: _Files) -> dict[str, str]:
    """Adds the tokens that only the configuration names, as transformers does. Returns the special tokens by role."""
    added_token = load_library("tokenizers").AddedToken
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    for number, token in sorted(
        (files.config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])
    ):
        if token["content"] in known:
            continue
        flags = {key: token.get(key, False) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        library.add_tokens([added_token(token["content"], **flags)])
        if library.token_to_id(token["content"]) != int(number):
            raise UserError(
                f"{files.tokenizer.parent / 'tokenizer_config.json'}: added token {token['content']!r} has id {number} "
                f"there, but would be {library.token_to_id(token['content'])} after the vocabulary of tokenizer.json"
            )
    special: dict[str, str] = {}
    for role in _ROLES:
        token = files.config.get(role) or files.special_tokens_map.get(role)
        if token is not None:
            special[role] = token["content"] if isinstance(token, dict) else token
    for one, other in (("sep_token", "eos_token"), ("bos_token", "cls_token")):
        for missing, present in ((one, other), (other, one)):
            if missing not in special and present in special:
                special[missing] = special[present]
    library.add_special_tokens([token for token in dict.fromkeys(special.values()) if token not in known])
    return special
