"""GPT datasets: samples for next-token prediction, cut from a shuffled stream of documents."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.utils.warn import warn_on_first_rank
from megatron.data.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.data.datasets.index_building import SampleIndices, SamplePlan, build_indices, plan_samples
from megatron.data.datasets.index_cache import Arrays
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.object_store import is_url
from megatron.data.datasets.special_tokens import (
    causal_mask,
    cumulative_lengths,
    document_mask,
    padding_id,
    restarted_positions,
)
from megatron.data.datasets.utils import Split

_INDICES = ["document_index", "sample_index", "shuffle_index"]


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """The data of a GPT run."""

    reset_position_ids: bool | None = None
    """Positions start at 0 in each document of a sample."""

    reset_attention_mask: bool | None = None
    """Tokens attend only to their own document. Items contain the document boundaries as `cu_seqlens`."""

    eod_mask_loss: bool | None = None
    """Set the loss mask to 0 where the input is an end-of-document token."""

    create_attention_mask: bool = True
    """Items contain the attention mask, bool [1, s, s], which costs s * s bytes per sample."""

    drop_last_partial_validation_sequence: bool = True
    """Leave out the last tokens of the validation split if they do not fill a sample; False: pad them."""

    add_extra_token_to_sequence: bool = True
    """Read sequence_length + 1 tokens, so that the last input has a label; False: pad the last label."""

    object_storage_cache_path: str | None = None
    """Local folder for copies of the .idx files of datasets in object stores; None: they are read into memory."""

    s3_cache_path: str | None = None
    """The name of `object_storage_cache_path` in scripts of releases 0.8 to 0.11."""

    vocab_size: int | None = None
    """Accepted without effect, for scripts of release 0.5: the tokenizer knows it."""

    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    context_parallel_size: int | None = None
    """Accepted without effect: only hybrid context parallelism uses these sizes."""

    hybrid_context_parallel: bool = False
    """Not supported yet: True raises UserError."""

    sequences_per_dataset: dict[str, int] | None = None
    token_dtype_code: int | None = None
    """Expectations about the files, which are checked when the files are opened."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index_copies is not None and is_url(self.index_copies):
            raise UserError(
                f"--object-storage-cache-path {self.index_copies}: copies of index files from object storage need a "
                "local folder"
            )
        if self.hybrid_context_parallel:
            raise UserError("--hybrid-context-parallel: not yet: samples padded for hybrid context parallelism")
        if self.needs_documents and getattr(self.tokenizer, "eod", None) is None:
            raise UserError(
                "--reset-position-ids, --reset-attention-mask, --eod-mask-loss: need a tokenizer with an "
                "end-of-document token"
            )

    @property
    def index_copies(self) -> str | None:
        """Local folder for copies of .idx files."""
        return self.object_storage_cache_path or self.s3_cache_path

    @property
    def needs_documents(self) -> bool:
        """Whether items depend on document boundaries."""
        return bool(self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss)

    @property
    def extra_tokens(self) -> int:
        """Number of tokens that a sample has in addition to sequence_length."""
        return int(self.add_extra_token_to_sequence)


class GPTDataset(MegatronDataset):
    """Samples of `sequence_length` tokens, in Megatron-LM's order (index_building.py).

    Item `i`, with s = sequence_length: `tokens` and `labels` int64 [s], `loss_mask` float32 [s], `position_ids` int64
    [s], `sample_id` int64 [] (= i); `attention_mask` bool [1, s, s] (True: masked) with create_attention_mask;
    `cu_seqlens` int32 [s + 1] (document boundaries from 0 to s, then s repeated) and `max_seqlen` int32 [] with
    reset_attention_mask. Item None is sample 0 without loss and with sample_id -1; it fills up a batch.

    The length is the number of samples in the required number of epochs and may exceed `num_samples`.

    Raises UserError if the split contains no tokens.
    """

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: Sequence[int] | np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self._tokens_per_epoch = _count_tokens(indexed_dataset, indexed_indices)
        if self._tokens_per_epoch == 0:
            raise UserError(f"{self._label()}: contains no tokens, so it has no samples")
        self._plan = self._plan_samples()
        self._pad = padding_id(config)
        self._log_epochs()
        indices = self._find_indices()
        self.document_index = indices.document_index
        self.sample_index = indices.sample_index
        self.shuffle_index = indices.shuffle_index
        self._plain_mask = None if config.reset_attention_mask else self._causal_mask()

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Returns the number of sequences, which splits divide."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> Any:
        """Opens the .bin and .idx files of a prefix."""
        assert dataset_path is not None
        expected = getattr(config, "token_dtype_code", None)
        copies = config.index_copies if isinstance(config, GPTDatasetConfig) else None
        return IndexedDataset(
            dataset_path, False, config.mmap_bin_files, copies, dtype_code=expected, num_ids=config.num_ids
        )

    @classmethod
    def is_empty(
        cls,
        low_level_dataset: object,
        indices: Sequence[int] | np.ndarray,
        config: BlendedMegatronDatasetConfig,
        split: Split,
    ) -> bool:
        """Whether these sequences contain no tokens."""
        return _count_tokens(low_level_dataset, indices) == 0

    @property
    def num_epochs(self) -> int:
        """Number of times that the stream of tokens contains the split."""
        return self._plan.num_epochs

    @property
    def shuffled_together(self) -> str:
        """The epochs of the sample plan, in words."""
        apart = "" if self._plan.samples_before_last_epoch is None else ", the last one on its own"
        return f"shuffled over {self.num_epochs} epochs{apart}"

    @property
    def tokens_per_epoch(self) -> int:
        """Number of tokens in the split."""
        return self._tokens_per_epoch

    def _identify(self) -> "OrderedDict[str, Any]":
        """Megatron-LM's identifiers, and everything else that the indices depend on: the content and the sample
        plan."""
        identifiers = super()._identify()
        identifiers["sequences"] = _describe_sequences(self.indices)
        identifiers["plan"] = vars(self._plan)
        identifiers["content"] = self.dataset.content_digest()
        return identifiers

    def __len__(self) -> int:
        return self._plan.num_samples

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        tokens, labels = self._tokens_and_labels(self.read_sample(0 if idx is None else idx))
        config = self.config
        # Find documents first: padding becomes token 0, which may be the end-of-document token.
        boundaries = cumulative_lengths(tokens, config.tokenizer.eod) if config.needs_documents else None
        loss_mask = (labels != self._pad).astype(np.float32)
        if config.eod_mask_loss:
            loss_mask[tokens == config.tokenizer.eod] = 0.0
        if idx is None:
            loss_mask[:] = 0.0
        tokens[tokens == self._pad] = 0
        labels[labels == self._pad] = 0
        if config.reset_position_ids:
            assert boundaries is not None
            position_ids = restarted_positions(boundaries)
        else:
            position_ids = np.arange(len(tokens), dtype=np.int64)
        item = {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(position_ids),
            "sample_id": torch.tensor(-1 if idx is None else idx),
        }
        return item | self._attention_fields(boundaries)

    def read_sample(self, idx: int) -> np.ndarray:
        """Returns the stored tokens of sample `idx`: sequence_length + extra_tokens of them, fewer in a partial
        sample."""
        if not 0 <= idx < len(self):
            raise IndexError(f"{self._label()}: sample {idx} requested, there are {len(self)}")
        row = int(self.shuffle_index[idx])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        end += self.config.extra_tokens
        if first == last:
            return self.dataset.get(int(self.document_index[first]), begin, end - begin)
        sequences = self.document_index[first : last + 1].tolist()
        parts = [self.dataset.get(sequences[0], begin)]
        parts += [self.dataset.get(sequence) for sequence in sequences[1:-1]]
        parts.append(self.dataset.get(sequences[-1], 0, end))
        return np.concatenate(parts)

    def document_lengths(self, idx: int) -> np.ndarray:
        """Returns the number of tokens of each document of sample `idx`, int64. A document is a stored sequence, which
        ends with the end-of-document token if it was prepared so."""
        row = int(self.shuffle_index[idx])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        lengths = self.dataset.sequence_lengths[self.document_index[first : last + 1]].astype(np.int64)
        lengths[-1] = end
        lengths[0] -= begin
        return lengths

    def _tokens_and_labels(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels (inputs shifted by one), int64 [s] each, padded with the pad id."""
        length = self.config.sequence_length
        text = np.full(length + 1, self._pad, np.int64)
        text[: len(stored)] = stored
        return text[:-1].copy(), text[1:].copy()

    def _attention_fields(self, boundaries: np.ndarray | None) -> dict[str, Tensor]:
        if not self.config.reset_attention_mask:
            return {} if self._plain_mask is None else {"attention_mask": self._plain_mask}
        assert boundaries is not None
        length = self.config.sequence_length
        cu_seqlens = np.full(length + 1, length, np.int32)
        cu_seqlens[: len(boundaries)] = boundaries
        fields = {
            "cu_seqlens": torch.from_numpy(cu_seqlens),
            "max_seqlen": torch.tensor(int(np.diff(boundaries).max()), dtype=torch.int32),
        }
        if self.config.create_attention_mask:
            fields["attention_mask"] = torch.from_numpy(document_mask(boundaries))
        return fields

    def _causal_mask(self) -> Tensor | None:
        """Returns the causal mask that all items share. It must not be changed."""
        if not self.config.create_attention_mask:
            return None
        return torch.from_numpy(causal_mask(self.config.sequence_length))

    def _plan_samples(self) -> SamplePlan:
        config = self.config
        keep_partial = self.index_split is Split.valid and not config.drop_last_partial_validation_sequence
        return plan_samples(
            self._tokens_per_epoch, self.num_samples, config.sequence_length, config.extra_tokens, not keep_partial
        )

    def _find_indices(self) -> SampleIndices:
        def build() -> Arrays:
            built = build_indices(self.indices, self.dataset.sequence_lengths, self._plan, self.config.random_seed)
            return vars(built)

        return SampleIndices(**self.load_or_build_indices(_INDICES, self._fits_plan, build))

    def _fits_plan(self, arrays: Arrays) -> bool:
        documents, cuts, order = (arrays[name] for name in _INDICES)
        return (
            documents.shape == (self._plan.num_epochs * len(self.indices),)
            and cuts.shape == (self._plan.num_samples + 1, 2)
            and order.shape == (self._plan.num_samples,)
            and all(array.dtype.kind in "iu" for array in arrays.values())
        )

    def _log_epochs(self) -> None:
        if self.num_samples is None or self._plan.num_epochs == 1:
            return
        tokens = self.num_samples * self.config.sequence_length
        warn_on_first_rank(
            f"{self._label()}: {self.num_samples} samples are {tokens / self._tokens_per_epoch:.1f} epochs over its "
            f"{self._tokens_per_epoch} tokens"
        )

    def _label(self) -> str:
        return f"{self.dataset_path or 'mock data'} ({self.index_split.name} split)"


class MockGPTLowLevelDataset:
    """Made-up documents: a document of length n contains 1, 2, ... n - 1 modulo the vocabulary size, then eod."""

    seed = 0
    num_documents = 100000
    max_length = 4096

    def __init__(self, tokenizer: Any) -> None:
        if getattr(tokenizer, "eod", None) is None or getattr(tokenizer, "vocab_size", None) is None:
            raise UserError("--mock-data: needs a tokenizer with a vocabulary size and an end-of-document token")
        self.tokenizer = tokenizer
        random = np.random.default_rng(self.seed)
        self.sequence_lengths = random.integers(1, self.max_length, size=self.num_documents, dtype=np.int32)

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, idx: int) -> np.ndarray:
        length = int(self.sequence_lengths[idx])
        counted = np.arange(1, length, dtype=np.int64) % self.tokenizer.vocab_size
        return np.append(counted, self.tokenizer.eod)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Returns `length` tokens (None: all) of a document from `offset` on."""
        stop = None if length is None else offset + length
        return self[idx][offset:stop]

    def content_digest(self) -> str:
        """Returns the numbers that the documents depend on, as text."""
        return json.dumps([self.seed, self.num_documents, self.max_length, self.tokenizer.vocab_size])


class MockGPTDataset(GPTDataset):
    """GPTDataset over made-up documents."""

    def __init__(
        self,
        dataset: MockGPTLowLevelDataset,
        dataset_path: str | None,
        indices: Sequence[int] | np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Returns the number of documents, which splits divide."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> Any:
        """Makes the documents. Ignores the path."""
        return MockGPTLowLevelDataset(config.tokenizer)


def _is_consecutive(indices: Sequence[int] | np.ndarray) -> bool:
    """Whether the indices are consecutive ascending numbers."""
    if isinstance(indices, range):
        return indices.step == 1
    return bool(np.array_equal(indices, np.arange(indices[0], indices[0] + len(indices))))


def _count_tokens(low_level_dataset: Any, indices: Sequence[int] | np.ndarray) -> int:
    if len(indices) == 0:
        return 0
    chosen = slice(int(indices[0]), int(indices[-1]) + 1) if _is_consecutive(indices) else np.asarray(indices)
    return int(low_level_dataset.sequence_lengths[chosen].sum(dtype=np.int64))


def _describe_sequences(indices: Sequence[int] | np.ndarray) -> str:
    if _is_consecutive(indices):
        return f"{indices[0]} to {indices[-1]}"
    return hashlib.sha256(np.asarray(indices, np.int64).tobytes()).hexdigest()
