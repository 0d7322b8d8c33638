"""BERT datasets: masked words, and pairs of segments whose order the model predicts (Devlin et al. 2018, ALBERT)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.data.datasets.masked_dataset import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig, padded
from megatron.data.datasets.masking import draw_spans, words_of

_TOKENS = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}
_NO_LABEL = -1


@dataclass
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """The data of a BERT run."""

    classification_head: bool | None = None
    """Samples are pairs of segments, half of them in swapped order. Required."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_missing(["classification_head"])
        self.refuse_tokenizer_without(_TOKENS, "BERT")
        if self.max_tokens < 2:
            raise UserError(
                f"--seq-length {self.sequence_length}: BERT's samples have three special tokens and at least two "
                "others; give 5 or more"
            )
        self.refuse_no_masks()

    @property
    def max_tokens(self) -> int:
        """Most tokens of text in a sample: the length without three special tokens."""
        return self.sequence_length - 3

    @property
    def min_sentences(self) -> int:
        """Fewest sentences of a sample."""
        return 2 if self.classification_head else 1


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """Samples of BERT: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without `classification_head`.

    Item `i`, with s = sequence_length, all int64: `text` [s], tokens with masked ones replaced; `types` [s], 0 in A, 1
    in B; `labels` [s], the replaced tokens, elsewhere -1; `loss_mask` [s], 1 where a token is masked; `padding_mask`
    [s], 0 at padding; `is_random` [], 1 if A and B are swapped; `truncated` [], 1 if tokens were cut off; `sample_id`
    [] (= i). Item None is sample 0 without loss (is_random -1) and with sample_id -1; it fills up a batch.

    Of the masked tokens 80 % become [MASK], 10 % a random token, and 10 % stay.
    """

    config: BERTMaskedWordPieceDatasetConfig

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        number = 0 if idx is None else idx
        sentences, target = self.read_sentences(number)
        random = self.random_of(number)
        first, second, swapped = self._segments(sentences, random)
        kept_first, kept_second = _truncate(len(first), len(second), target, random)
        truncated = len(first) + len(second) > target
        tokens, types = self._join(first[kept_first], second[kept_second])
        masked, labels = self._mask(tokens, target, random)
        return self._fields(idx, masked, types, labels, swapped, truncated)

    def _segments(
        self, sentences: list[np.ndarray], random: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Returns segments A and B, and whether they are swapped. Without a classification head B is empty."""
        if not self.config.classification_head:
            return np.concatenate(sentences), np.empty(0, np.int64), False
        pivot = random.randint(low=1, high=len(sentences)) if len(sentences) >= 3 else 1
        first, second = np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])
        if random.random_sample() < 0.5:
            return second, first, True
        return first, second, False

    def _join(self, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a sample with special tokens, and their segments."""
        tokenizer = self.config.tokenizer
        parts: list[Any] = [[tokenizer.cls], first, [tokenizer.sep]]
        if len(second):
            parts += [second, [tokenizer.sep]]
        tokens = np.concatenate(parts).astype(np.int64)
        types = np.zeros(len(tokens), np.int64)
        types[len(first) + 2 :] = 1
        return tokens, types

    def _mask(self, tokens: np.ndarray, target: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens with masked ones replaced, and the labels."""
        tokenizer = self.config.tokenizer
        special = (tokens == tokenizer.cls) | (tokens == tokenizer.sep)
        words = words_of(self._continues[tokens], special)
        masked, labels = tokens.copy(), np.full(len(tokens), _NO_LABEL, np.int64)
        for span in draw_spans(words, self._rule.count(len(tokens), target), self._rule, random):
            labels[span] = tokens[span]
            for position in span:
                masked[position] = self._replacement(int(tokens[position]), random)
        return masked, labels

    def _replacement(self, token: int, random: np.random.RandomState) -> int:
        """Returns the token that replaces a masked one: [MASK], a random token, or the same token."""
        if random.random_sample() < 0.8:
            return int(self.config.tokenizer.mask)
        if random.random_sample() >= 0.5:
            return int(self._ids[random.randint(0, len(self._ids))])
        return token

    def _fields(
        self, idx: int | None, tokens: np.ndarray, types: np.ndarray, labels: np.ndarray, swapped: bool, truncated: bool
    ) -> dict[str, Tensor]:
        length = self.config.sequence_length
        filled = {
            "text": padded(tokens, length, self.config.tokenizer.pad),
            "types": padded(types, length, 0),
            "labels": padded(labels, length, _NO_LABEL),
            "loss_mask": padded(labels != _NO_LABEL, length, 0),
            "padding_mask": padded(np.ones(len(tokens)), length, 0),
        }
        numbers = {"is_random": int(swapped), "truncated": int(truncated), "sample_id": idx}
        if idx is None:
            filled["loss_mask"][:] = 0
            numbers |= {"is_random": _NO_LABEL, "sample_id": -1}
        tensors = {name: torch.from_numpy(array) for name, array in filled.items()}
        return tensors | {name: torch.tensor(number) for name, number in numbers.items()}


def _truncate(first: int, second: int, target: int, random: np.random.RandomState) -> tuple[slice, slice]:
    """Returns the kept parts of two segments of these lengths, `target` tokens at most.

    Removes one token at a time, from the longer segment (the second if both are equal), at a random end of it.
    """
    bounds = [[0, first], [0, second]]
    for at_begin in (random.random_sample(max(0, first + second - target)) < 0.5).tolist():
        longer = bounds[0] if bounds[0][1] - bounds[0][0] > bounds[1][1] - bounds[1][0] else bounds[1]
        if at_begin:
            longer[0] += 1
        else:
            longer[1] -= 1
    return slice(*bounds[0]), slice(*bounds[1])
