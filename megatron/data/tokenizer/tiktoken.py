"""TikTokenizer: a vocabulary of ranked byte strings in a .json file, encoded by the `tiktoken` library."""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json
from megatron.data.tokenizer.base import Tokenizer, load_library

DEFAULT_VOCAB_SIZE = 1 << 17
_LEGACY_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
_SPECIAL_TOKENS = (*_LEGACY_SPECIAL_TOKENS, "<mask>", "<pad>", "<cls>", "<sep>")
_ROLE_OF_TOKEN = {
    "<unk>": "unk_token",
    "<s>": "bos_token",
    "</s>": "eos_token",
    "<mask>": "mask_token",
    "<pad>": "pad_token",
    "<cls>": "cls_token",
    "<sep>": "sep_token",
}

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


class TikTokenizer(Tokenizer):
    """Ids by a ranked list of byte strings. The first `num_special_tokens` ids are special tokens, the list follows.

    `model` is a JSON list of {"rank": i, "token_bytes": base64} in order of rank, cut to fit into `vocab_size`. Special
    tokens without a name are called <SPECIAL_i>. Their spelling in a text becomes the special token, except with
    `legacy`.
    """

    type_name = "TikTokenizer"

    def __init__(
        self,
        model: str,
        pattern: str = "v2",
        vocab_size: int | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] | None = None,
        legacy: bool = False,
    ) -> None:
        self._legacy = legacy
        self._vocab_size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
        named = list(special_tokens or (_LEGACY_SPECIAL_TOKENS if legacy else _SPECIAL_TOKENS))
        if len(set(named)) < len(named) or len(named) > num_special_tokens or "</s>" not in named:
            raise UserError(
                f"--tiktoken-special-tokens {' '.join(named)}: they must differ, contain </s> (it ends a document), "
                f"and be at most --tiktoken-num-special-tokens {num_special_tokens}"
            )
        named += [f"<SPECIAL_{i}>" for i in range(len(named), num_special_tokens)]
        self._special = {token: i for i, token in enumerate(named)}
        ranks = _read_ranks(Path(model), self._vocab_size, num_special_tokens)
        self._ranks_digest = hashlib.sha256(b"".join(b"%d:%b" % (len(token), token) for token in ranks)).hexdigest()
        self._pattern = PATTERNS[pattern]
        self._library = load_library("tiktoken").Encoding(
            name=Path(model).stem,
            pat_str=self._pattern,
            mergeable_ranks={token: rank + num_special_tokens for token, rank in ranks.items()},
            special_tokens=self._special,
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, without padding."""
        return self._vocab_size

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        return self._special["</s>"]

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        """Special ids by role."""
        return {_ROLE_OF_TOKEN[token]: i for token, i in self._special.items() if token in _ROLE_OF_TOKEN}

    @property
    def special_literals(self) -> tuple[str, ...]:
        """Spellings of the special tokens in text."""
        return tuple(self._special)

    @property
    def matches_special_literals(self) -> bool:
        """Whether a spelling in a text becomes the special token: not with `legacy`."""
        return not self._legacy

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        if self._legacy:
            return self._library.encode_ordinary(text)
        return self._library.encode(text, allowed_special="all")

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        return self._library.decode(list(ids))

    def _identity(self) -> dict[str, Any]:
        return {
            "ranks": self._ranks_digest,
            "pattern": self._pattern,
            "special": self._special,
            "legacy": self._legacy,
            "vocab_size": self._vocab_size,
        }


def _read_ranks(path: Path, vocab_size: int, num_special_tokens: int) -> dict[bytes, int]:
    """Reads the ranks of the byte strings, as many as fit beside the special tokens."""
    wanted = vocab_size - num_special_tokens
    try:
        entries = parse_json(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"--tokenizer-model {path}: {error.strerror}; TikTokenizer reads a .json file") from None
    except ValueError as error:
        raise UserError(f"--tokenizer-model {path}: not JSON in UTF-8: {error}") from None
    if wanted < 256 or not isinstance(entries, list) or len(entries) < wanted:
        found = len(entries) if isinstance(entries, list) else 0
        raise UserError(
            f"--tokenizer-model {path}: a list of {found} entries; --vocab-size {vocab_size} less "
            f"{num_special_tokens} special tokens needs {wanted}, and at least the 256 bytes"
        )
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[:wanted]):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
            in_order = entry["rank"] == rank
        except (TypeError, KeyError, binascii.Error) as error:
            raise UserError(f"--tokenizer-model {path}: entry {rank}: {error!r}") from None
        if not in_order or token in ranks or (rank < 256 and token != bytes([rank])):
            raise UserError(
                f"--tokenizer-model {path}: entry {rank} is rank {entry['rank']}, {token!r}; entries must come in "
                "order of rank, each once, the 256 single bytes first"
            )
        ranks[token] = rank
    return ranks
