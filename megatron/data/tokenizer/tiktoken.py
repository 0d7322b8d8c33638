"""TikTokenizer: a vocabulary of ranked byte strings, encoded by the `tiktoken` library."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.base import Tokenizer, load_library
from megatron.data.tokenizer.config import DEFAULT_SPECIAL_TOKENS
from megatron.data.tokenizer.tiktoken_vocabulary import end_of_document, read_vocabulary

_ROLE_OF_TOKEN = {
    "<unk>": "unk_token",
    "<s>": "bos_token",
    "</s>": "eos_token",
    "<mask>": "mask_token",
    "<pad>": "pad_token",
    "<cls>": "cls_token",
    "<sep>": "sep_token",
    "<|begin_of_text|>": "bos_token",
    "<|end_of_text|>": "eos_token",
    "<|endoftext|>": "eos_token",
    "<|finetune_right_pad_id|>": "pad_token",
}


class TikTokenizer(Tokenizer):
    """Ids by a ranked list of byte strings. `model` is one of:

    - a JSON list of {"rank": i, "token_bytes": base64} in order of rank, cut to fit into `vocab_size`. The first
      `num_special_tokens` ids (1000) are special tokens, the list follows. Those without a name are called <SPECIAL_i>.
    - a file with base64 and rank on each line, such as Llama 3's tokenizer.model. `num_special_tokens` (256) special
      tokens follow. By default they have Llama 3's names; those without a name are called
      <|reserved_special_token_i|>. Texts are split into words as by Llama 3, unless `pattern` is given.
    - tiktoken:NAME, an encoding that the package tiktoken has on this machine.

    The spelling of a special token in a text becomes the special token, except with `legacy`.
    """

    type_name = "TikTokenizer"

    def __init__(
        self,
        model: str,
        pattern: str | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int = DEFAULT_SPECIAL_TOKENS,
        special_tokens: Sequence[str] | None = None,
        legacy: bool = False,
    ) -> None:
        self._legacy, self.matches_special_literals = legacy, not legacy
        vocabulary = read_vocabulary(model, pattern, vocab_size, num_special_tokens, special_tokens, legacy)
        self._special, self._pattern = vocabulary.special, vocabulary.pattern
        end = end_of_document(self._special)
        if end is None:
            raise UserError(f"--tokenizer-model {model}: has no special token that ends a document")
        self.eod, self.special_literals = self._special[end], tuple(self._special)
        self.special_tokens_dict = {_ROLE_OF_TOKEN[s]: i for s, i in self._special.items() if s in _ROLE_OF_TOKEN}
        self.vocab_size = 1 + max(*self._special.values(), *vocabulary.ranks.values())
        self._known = frozenset([*vocabulary.ranks.values(), *self._special.values()])
        tokens = vocabulary.ranks  # in order of rank
        self._ranks_digest = hashlib.sha256(b"".join(b"%d:%b" % (len(token), token) for token in tokens)).hexdigest()
        self._library = load_library("tiktoken").Encoding(
            name=Path(model).stem,
            pat_str=self._pattern,
            mergeable_ranks=vocabulary.ranks,
            special_tokens=self._special,
        )

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        if self._legacy:
            return self._library.encode_ordinary(text)
        return self._library.encode(text, allowed_special="all")

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of ids. An id between those of tokens, which a model may write, has no text."""
        return self._library.decode([i for i in ids if i in self._known])

    def _identity(self) -> dict[str, Any]:
        return {
            "ranks": self._ranks_digest,
            "pattern": self._pattern,
            "special": self._special,
            "legacy": self._legacy,
            "vocab_size": self.vocab_size,
        }
