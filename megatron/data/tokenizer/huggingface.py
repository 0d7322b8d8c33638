"""HuggingFaceTokenizer: a tokenizer.json, or a folder with one, read by the `tokenizers` library alone."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.base import EncodedTexts, Tokenizer, pack_ids
from megatron.data.tokenizer.huggingface_fast import HuggingFaceFastPath, why_not_fast
from megatron.data.tokenizer.huggingface_files import (
    TokenizerFiles,
    find_files,
    load_tokenizer,
    naming_failures_of_library,
)

_STAND_INS = {"sep_token": "eos_token", "eos_token": "sep_token", "bos_token": "cls_token", "cls_token": "bos_token"}
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face tokenizer. It adds the template's BOS and EOS only with `include_special_tokens`.

    Added tokens, including special ones, are matched in text, as in the library. Tokens that only
    tokenizer_config.json, special_tokens_map.json or added_tokens.json name are added to those of tokenizer.json, as in
    transformers. `eod` is the EOS token of these files. EOS and SEP replace each other if one is missing, and so do BOS
    and CLS.

    <extra_id_0>, <extra_id_1>, ... are T5's sentinels. With `vocab_extra_ids`, those up to this number that the folder
    lacks get ids after its vocabulary; they are not matched in text, so data that was prepared without them fits.
    """

    type_name = "HuggingFaceTokenizer"

    def __init__(self, path: str, include_special_tokens: bool = False, vocab_extra_ids: int = 0) -> None:
        files = find_files(Path(path))
        self._include_special_tokens = include_special_tokens
        self._library, self._special_texts = load_tokenizer(files)
        self._file = files.tokenizer
        self._special = {role: self._library.token_to_id(token) for role, token in self._special_texts.items()}
        for one, other in _STAND_INS.items():
            self._special |= {one: self._special[other]} if one not in self._special and other in self._special else {}
        self.eod = self._end_of_document(files)
        self.special_tokens_dict = dict(self._special)
        self._state = json.loads(self._library.to_str())
        self.special_literals = tuple(token["content"] for token in self._state["added_tokens"] if token["special"])
        self._fast, self.speed_note = self._make_fast()
        vocab = self._library.get_vocab(with_added_tokens=True)
        self._own_size = max(len(vocab), max(vocab.values()) + 1)
        self.additional_special_tokens_ids, self._added = self._make_sentinels(vocab_extra_ids)
        self.vocab_size = self._own_size + len(self._added)

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

    def _end_of_document(self, files: TokenizerFiles) -> int:
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
    def vocab(self) -> dict[str, int]:
        """Ids by token."""
        return self._library.get_vocab(with_added_tokens=True) | {token: i for i, token in self._added.items()}

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Tokens by id, in order of id."""
        return dict(sorted((i, token) for token, i in self.vocab.items()))

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        return self._encoding(text, self._include_special_tokens).ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        """Returns the library's encoding of a text: ids, and their places in the text."""
        with naming_failures_of_library(f"{self._file}: the tokenizers library cannot encode a text"):
            return self._library.encode(text, add_special_tokens=add_special_tokens)

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
        with naming_failures_of_library(f"{self._file}: the tokenizers library cannot encode a text"):
            encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=self._include_special_tokens)
        return pack_ids([encoding.ids for encoding in encodings])

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
