"""Made-up documents of sentences, to try BERT and T5 without a dataset (--mock-data)."""

import json
from typing import Any

import numpy as np

from megatron.core.exceptions import UserError
from megatron.data.datasets.special_tokens import special_id

_SPECIAL = ("cls", "sep", "mask", "pad", "bos", "eos", "eod")


class MockSentences:
    """Made-up documents with the attributes of an IndexedDataset that a dataset of masked words reads.

    A sentence contains consecutive ids of the vocabulary, so that a model can learn to fill its masks. Special tokens
    do not occur. Raises UserError if the vocabulary has no other tokens.
    """

    seed = 0
    num_documents = 2000
    most_sentences = 12
    longest_sentence = 40

    def __init__(self, tokenizer: Any) -> None:
        special = {special_id(tokenizer, name) for name in _SPECIAL}
        special |= set(getattr(tokenizer, "additional_special_tokens_ids", None) or [])
        self._ids = np.array(sorted(set(tokenizer.inv_vocab) - special), np.int64)
        if not len(self._ids):
            raise UserError("--mock-data: the tokenizer has special tokens only")
        random = np.random.default_rng(self.seed)
        counts = random.integers(2, self.most_sentences + 1, self.num_documents)
        self.document_indices = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        sentences = int(self.document_indices[-1])
        self.sequence_lengths = random.integers(2, self.longest_sentence + 1, sentences, dtype=np.int32)
        self._starts = random.integers(0, len(self._ids), sentences)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, idx: int) -> np.ndarray:
        """Returns a sentence, int64 [tokens]."""
        places = (self._starts[idx] + np.arange(self.sequence_lengths[idx])) % len(self._ids)
        return self._ids[places]

    def content_digest(self, with_documents: bool = False) -> str:
        """Returns the numbers that the documents depend on, as text."""
        numbers = [self.seed, self.num_documents, self.most_sentences, self.longest_sentence]
        return json.dumps([*numbers, len(self._ids), int(self._ids.sum())])
