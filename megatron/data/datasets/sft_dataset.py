"""Conversations for supervised fine-tuning: packed into samples, with a loss on the assistant's turns only."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.utils.warn import warn_on_first_rank
from megatron.data.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.data.datasets.conversations import ConversationFile, parse_conversation
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.special_tokens import restarted_positions
from megatron.data.datasets.utils import Split


class SFTConversations:
    """The conversations of a file (`conversations.ConversationFile`), encoded. A row may have other fields that the
    chat template reads, such as tools.

    `tokenizer.encode_conversation(messages, fields)` gives ids and, for each, whether it is learned: 0 or False if not,
    1 or True, or a larger number for another kind of turn. Raises UserError
    that names file and line for a line that is no conversation or has no turn to learn from. Fields that the template
    does not read are named in a warning.
    """

    def __init__(self, path: str, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "encode_conversation"):
            raise UserError(f"--sft: {path} has conversations, which only --tokenizer-type SFTTokenizer encodes")
        file = ConversationFile(path)
        ids: list[np.ndarray] = []
        learned: list[np.ndarray] = []
        kinds: list[np.ndarray] = []
        unread: Counter[str] = Counter()
        for place, line in file:
            try:
                encoded = _encode(tokenizer, line, unread)
            except UserError as error:
                raise UserError(f"{place}: {error}") from None
            ids.append(np.array(encoded[0], np.int32))
            learned.append(np.array(encoded[1], bool))
            kinds.append(np.array(encoded[1], np.int8))
        if not ids:
            raise UserError(f"--data-path {path}: contains no conversations")
        if unread:
            named = ", ".join(f"{name} ({count})" for name, count in sorted(unread.items()))
            warn_on_first_rank(f"{path}: the chat template does not read these fields, in so many lines: {named}")
        self.ids, self.learned, self.kinds = ids, learned, kinds
        self.digest = file.digest

    def __len__(self) -> int:
        return len(self.ids)


def _encode(tokenizer: Any, line: bytes, unread: Counter[str]) -> tuple[Sequence[int], Sequence[bool]]:
    """Encodes a line. Counts the fields that the tokenizer's template does not read."""
    messages, fields = parse_conversation(line)
    if not hasattr(tokenizer, "unread_fields"):  # of a script
        unread.update(fields.keys())
        return tokenizer.encode_conversation(messages)
    encoded = tokenizer.encode_conversation(messages, fields)
    unread.update(tokenizer.unread_fields(messages, fields))
    return encoded


class SFTDataset(MegatronDataset):
    """Samples of `sequence_length` tokens, each of whole conversations, one after the other, padded at the end.

    Conversations are shuffled anew for each epoch by the seed and put into samples in this order. Tokens attend to
    their own conversation; positions start at 0 in each. Items are those of GPTDataset with reset_attention_mask; the
    loss mask is 1 where the label belongs to an assistant's turn. A conversation that is longer than a sample is cut,
    and the number of such conversations is logged. Item None has no loss; it fills up a batch.
    """

    def __init__(
        self,
        dataset: SFTConversations,
        dataset_path: str | None,
        indices: Sequence[int] | np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        numbers = np.asarray(indices, np.int64)
        # The last token of a conversation is only a label.
        lengths = np.array([max(1, len(dataset.ids[number]) - 1) for number in numbers], np.int64)
        cut = int((lengths > config.sequence_length).sum())
        if cut:
            warn_on_first_rank(
                f"{dataset_path}: {cut} of {len(numbers)} conversations are longer than --seq-length "
                f"{config.sequence_length} and are cut"
            )
        self._check_that_something_is_learned(numbers)
        self._order, self._first = _pack(
            numbers, lengths.clip(max=config.sequence_length), config.sequence_length, num_samples, config.random_seed
        )

    def _check_that_something_is_learned(self, numbers: np.ndarray) -> None:
        """Says how many conversations have no label that is learned, because of the cut; refuses to train on those."""
        length, learned = self.config.sequence_length, self.dataset.learned
        empty = sum(not learned[number][1 : length + 1].any() for number in numbers)
        if not empty:
            return
        said = (
            f"{self.dataset_path}: nothing is learned from {empty} of {len(numbers)} conversations: what the assistant "
            f"writes begins after the first {length + 1} tokens (--seq-length {length})"
        )
        if empty == len(numbers) and self.index_split is Split.train:
            raise UserError(f"{said}; give a larger --seq-length")
        warn_on_first_rank(said)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Returns the number of conversations, which splits divide."""
        return len(low_level_dataset)

    @staticmethod
    def files_of(prefix: str) -> tuple[str, ...]:
        """Returns the file of conversations, whose name is the prefix."""
        return (prefix,)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> object:
        """Reads and encodes a file of conversations."""
        assert dataset_path is not None
        return SFTConversations(dataset_path, config.tokenizer)

    def _identify(self) -> "OrderedDict[str, Any]":
        return OrderedDict(super()._identify() | {"content": self.dataset.digest})

    def __len__(self) -> int:
        return len(self._first) - 1

    def document_lengths(self, idx: int) -> np.ndarray:
        """Returns the number of tokens of each conversation of sample `idx` and of the padding, int64."""
        length = self.config.sequence_length
        numbers = self._order[self._first[idx] : self._first[idx + 1]].tolist()
        lengths = [min(length, max(1, len(self.dataset.ids[number]) - 1)) for number in numbers]
        return np.array([*lengths, length - sum(lengths)])

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        sample = 0 if idx is None else idx
        if not 0 <= sample < len(self):
            raise IndexError(f"{self.dataset_path}: sample {idx} requested, there are {len(self)}")
        length = self.config.sequence_length
        tokens, labels = np.zeros(length, np.int64), np.zeros(length, np.int64)
        loss_mask = np.zeros(length, np.float32)
        kinds = np.zeros(length, np.int32)
        boundaries = [0]
        for number in self._order[self._first[sample] : self._first[sample + 1]].tolist():
            ids, learned = self.dataset.ids[number], self.dataset.learned[number]
            begin = boundaries[-1]
            end = min(length, begin + max(1, len(ids) - 1))
            tokens[begin:end] = ids[: end - begin]
            count = min(end - begin, len(ids) - 1)  # 0 for a conversation of one token, which has no label
            labels[begin : begin + count] = ids[1 : count + 1]
            loss_mask[begin : begin + count] = learned[1 : count + 1]
            kinds[begin : begin + count] = self.dataset.kinds[number][1 : count + 1].clip(min=1) - 1
            boundaries.append(end)
        if boundaries[-1] < length:
            boundaries.append(length)
        if idx is None:
            loss_mask[:] = 0.0
        lengths = np.full(length + 1, length, np.int32)
        lengths[: len(boundaries)] = boundaries
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "turn_kinds": torch.from_numpy(kinds),
            "position_ids": torch.from_numpy(restarted_positions(np.array(boundaries))),
            "cu_seqlens": torch.from_numpy(lengths),
            "max_seqlen": torch.tensor(int(np.diff(boundaries).max()), dtype=torch.int32),
            "sample_id": torch.tensor(-1 if idx is None else idx),
        }


def _pack(
    numbers: np.ndarray, lengths: np.ndarray, room: int, num_samples: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the order of conversations over all epochs, and where in it each sample begins, with the end appended.

    A sample takes conversations until the next one does not fit. `num_samples` None: one epoch.
    """
    orders: list[np.ndarray] = []
    first, used, epoch = [0], 0, 0
    position = 0
    while True:
        order = np.random.RandomState((seed + epoch) % 2**32).permutation(len(numbers))
        orders.append(numbers[order])
        for length in lengths[order].tolist():
            if used and used + length > room:
                first.append(position)
                used = 0
            used += length
            position += 1
        epoch += 1
        if num_samples is None or len(first) >= num_samples:
            break
    if used:
        first.append(position)
    return np.concatenate(orders), np.array(first, np.int64)
