"""NullTokenizer: texts that consist of ids."""

from collections.abc import Sequence
from typing import Any

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.base import Tokenizer


class NullTokenizer(Tokenizer):
    """Reads decimal ids, separated by one blank. Ids 0 to `vocab_size` - 1 are text, and the id `vocab_size` ends a
    document. The property `vocab_size` is therefore one more than the argument.

    `eod` and `pad` select other ids for these roles.
    """

    type_name = "NullTokenizer"

    def __init__(self, vocab_size: int, eod: int | None = None, pad: int | None = None) -> None:
        self._size, self.vocab_size = vocab_size, vocab_size + 1
        self.eod = vocab_size if eod is None else eod
        self.special_tokens_dict = {"eos_token": self.eod} | ({} if pad is None else {"pad_token": pad})

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        if not text:
            return []
        try:
            ids = [int(word) for word in text.split(" ")]
        except ValueError:
            word = next(word for word in text.split(" ") if not word.lstrip("-").isdigit())
            raise UserError(f"NullTokenizer reads ids separated by one blank, but found {word!r}") from None
        outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if outside is not None:
            raise UserError(f"NullTokenizer: id {outside} is outside 0 to {self._size} (--vocab-size {self._size})")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        return " ".join(str(i) for i in ids)

    def _identity(self) -> dict[str, Any]:
        return {"size": self._size, "eod": self.eod, "pad": self.pad}
