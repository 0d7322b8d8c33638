"""The base class of BERT and T5 datasets: samples of whole sentences, some of whose words are masked."""

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.exceptions import UserError
from megatron.core.utils.warn import warn_on_first_rank
from megatron.data.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.data.datasets.index_cache import Arrays
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.datasets.masking import MaskingRule
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.mock_sentences import MockSentences
from megatron.data.datasets.sample_map import (
    LONGEST_SENTENCE,
    SampleMapPlan,
    UsableDocuments,
    build_sample_map,
    find_usable_documents,
)
from megatron.data.datasets.special_tokens import special_id
from megatron.data.datasets.utils import Split

_INDICES = ["sample_index", "counts"]
_NO_SENTENCES = (
    "each document is one sequence: the text was not divided into sentences, which tools/preprocess_data.py "
    "--split-sentences does, or has no sentence ends"
)
_REQUIRED = (
    "masking_probability",
    "short_sequence_probability",
    "masking_max_ngram",
    "masking_do_full_word",
    "masking_do_permutation",
    "masking_use_longer_ngrams",
    "masking_use_geometric_distribution",
)


@dataclass
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """The data of a run with masked words. All fields below are required; None is no value."""

    masking_probability: float | None = None
    """Fraction of the tokens of a sample that are masked."""

    short_sequence_probability: float | None = None
    """Fraction of the samples that are shorter than the sequence length."""

    masking_max_ngram: int | None = None
    """Longest run of words that is masked at once."""

    masking_do_full_word: bool | None = None
    """Mask all pieces of a word; False: each token is a word."""

    masking_do_permutation: bool | None = None
    """Permute words instead of masking them. Not supported: True raises UserError."""

    masking_use_longer_ngrams: bool | None = None
    """Mask long runs more often than short ones."""

    masking_use_geometric_distribution: bool | None = None
    """Draw the lengths of runs from a geometric distribution."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_missing(_REQUIRED)
        assert self.masking_probability is not None and self.short_sequence_probability is not None
        assert self.masking_max_ngram is not None
        if not 0 < self.masking_probability < 1:
            raise UserError(
                f"--mask-prob {self.masking_probability}: expected a fraction between 0 and 1, such as 0.15"
            )
        if not 0 <= self.short_sequence_probability <= 1:
            raise UserError(
                f"--short-seq-prob {self.short_sequence_probability}: expected a fraction from 0 to 1, such as 0.1"
            )
        if self.masking_max_ngram < 1:
            raise UserError(f"masking_max_ngram {self.masking_max_ngram}: expected 1 or more")
        if self.masking_do_permutation:
            raise UserError("masking_do_permutation: not yet: words are masked, not permuted")
        if self.masking_use_longer_ngrams and self.masking_use_geometric_distribution:
            raise UserError(
                "masking_use_longer_ngrams has no meaning with masking_use_geometric_distribution; give one of them"
            )

    def refuse_no_masks(self) -> None:
        """Raises UserError if not even the longest sample would have a masked token."""
        assert self.masking_probability is not None
        if self.masking_probability * self.max_tokens < 1:
            raise UserError(
                f"--mask-prob {self.masking_probability}: is less than one of the {self.max_tokens} tokens of a sample "
                f"with --seq-length {self.sequence_length}, so nothing would be masked; "
                f"{1 / self.max_tokens:.2g} is enough, or --seq-length "
                f"{self.sequence_length - self.max_tokens + math.ceil(1 / self.masking_probability)}"
            )

    def refuse_missing(self, fields: Sequence[str]) -> None:
        """Raises UserError if one of these fields has no value."""
        missing = [field for field in fields if getattr(self, field) is None]
        if missing:
            raise UserError(f"{type(self).__name__}: {', '.join(missing)}: a value is required")

    def refuse_tokenizer_without(self, tokens: dict[str, str], needed_by: str, remedy: str = "") -> None:
        """Raises UserError if the tokenizer has no id for one of these tokens, given as {attribute: spelling}."""
        missing = [spelling for name, spelling in tokens.items() if not is_id(special_id(self.tokenizer, name))]
        if missing:
            raise UserError(
                f"--tokenizer-type {tokenizer_name(self.tokenizer)}: has no token {', '.join(missing)}, which "
                f"{needed_by} needs; BertWordPieceLowerCase and BertWordPieceCase have all, and a HuggingFaceTokenizer "
                f"has those that its tokenizer_config.json names{remedy}"
            )
        if not hasattr(self.tokenizer, "inv_vocab"):
            raise UserError(
                f"--tokenizer-type {tokenizer_name(self.tokenizer)}: cannot list its tokens (inv_vocab), which "
                f"{needed_by} needs to find whole words; BertWordPieceLowerCase, BertWordPieceCase and "
                "HuggingFaceTokenizer can"
            )

    @property
    def masking_rule(self) -> MaskingRule:
        """How the masked words are chosen."""
        assert self.masking_probability is not None and self.masking_max_ngram is not None
        return MaskingRule(
            self.masking_probability,
            self.masking_max_ngram,
            bool(self.masking_use_geometric_distribution),
            bool(self.masking_use_longer_ngrams),
        )

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """Largest number of tokens of a sample, without special tokens."""

    @property
    @abstractmethod
    def min_sentences(self) -> int:
        """Smallest number of sentences of a document that is used."""


def is_id(value: Any) -> bool:
    """Whether a special id of a tokenizer exists; tokenizers return None or -1 for a missing one."""
    return value is not None and value >= 0


def padded(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    """Returns the values as int64 [length], followed by `fill`."""
    array = np.full(length, fill, np.int64)
    array[: len(values)] = values
    return array


def tokenizer_name(tokenizer: object) -> str:
    """Returns the tokenizer's type for messages: the value of --tokenizer-type, or the name of a user's class."""
    return getattr(tokenizer, "type_name", type(tokenizer).__name__)


class MaskedWordPieceDataset(MegatronDataset):
    """Samples of consecutive sentences of one document (sample_map.py), with masked words (masking.py).

    Splits divide documents. Item `i` depends on the random seed, `i` and the sample's sentences alone. The length is
    the number of samples in the required number of epochs and may exceed `num_samples`.

    Raises UserError if samples are requested and no document of the split is usable.
    """

    config: MaskedWordPieceDatasetConfig

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: Sequence[int] | np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: MaskedWordPieceDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        first, last = int(indexed_indices[0]), int(indexed_indices[-1])
        assert last - first + 1 == len(indexed_indices), "documents of a split are consecutive"
        self._first, self._end = first, last + 1
        self._rule = config.masking_rule
        self._ids = np.array(list(config.tokenizer.inv_vocab), np.int64)
        self._continues = self._find_continuations()
        self.sample_index = self._find_sample_index()

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Returns the number of documents, which splits divide."""
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> object:
        """Opens the .bin and .idx files of a prefix, or makes up documents."""
        if dataset_path is None:
            return MockSentences(config.tokenizer)
        return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files, num_ids=config.num_ids)

    def __len__(self) -> int:
        return len(self.sample_index)

    @property
    def shuffled_together(self) -> str:
        """The epochs of the sample map, in words."""
        return f"shuffled over {self._num_epochs} epochs"

    def read_sentences(self, idx: int) -> tuple[list[np.ndarray], int]:
        """Returns the sentences of sample `idx`, and its target length in tokens."""
        if not 0 <= idx < len(self):
            raise IndexError(f"{self._label()}: sample {idx} requested, there are {len(self)}")
        first, end, target = self.sample_index[idx].tolist()
        return [self.dataset.get(sentence) for sentence in range(first, end)], target

    def random_of(self, idx: int) -> np.random.RandomState:
        """Returns the random numbers of sample `idx`."""
        return np.random.RandomState((self.config.random_seed + idx) % 2**32)

    def _identify(self) -> "OrderedDict[str, Any]":
        identifiers = super()._identify()
        identifiers["documents"] = f"{self._first} to {self._end - 1}"
        identifiers["plan"] = vars(self._plan)
        identifiers["content"] = self.dataset.content_digest(with_documents=True)
        return identifiers

    @property
    def _plan(self) -> SampleMapPlan:
        config = self.config
        assert config.short_sequence_probability is not None
        return SampleMapPlan(
            self.num_samples,
            config.max_tokens,
            config.min_sentences,
            config.short_sequence_probability,
            config.random_seed,
        )

    def _find_continuations(self) -> np.ndarray:
        """Returns bool [vocabulary]: whether a token continues a word."""
        tokens = self.config.tokenizer.inv_vocab
        continues = np.zeros(max(tokens) + 1, np.bool_)
        if self.config.masking_do_full_word:
            continues[[i for i, token in tokens.items() if token.startswith("##")]] = True
        return continues

    def _find_sample_index(self) -> np.ndarray:
        boundaries = self.dataset.document_indices[self._first : self._end + 1]

        def build() -> Arrays:
            lengths = self.dataset.sequence_lengths
            found = find_usable_documents(boundaries, lengths, self.config.min_sentences)
            self._refuse_unusable(found, boundaries)
            built = build_sample_map(boundaries, lengths, found.usable, self._plan)
            counts = [found.too_few_sentences, found.too_long_sentence, built.num_tokens, built.cut_tokens]
            counts.append(built.num_epochs)
            return {"sample_index": built.rows, "counts": np.array(counts, np.int64)}

        def fits(arrays: Arrays) -> bool:
            rows, counts = (arrays[name] for name in _INDICES)
            return rows.ndim == 2 and rows.shape[1] == 3 and rows.dtype.kind == "u" and counts.shape == (5,)

        arrays = self.load_or_build_indices(_INDICES, fits, build)
        self._num_epochs = int(arrays["counts"][-1])
        self._log_use(*arrays["counts"].tolist())
        return arrays["sample_index"]

    def _log_use(self, too_few: int, too_long: int, tokens: int, cut: int, epochs: int) -> None:
        """Prints how much of the data is unused, and how often the rest is repeated."""
        for number, what in (
            (too_few, f"with fewer than {self.config.min_sentences} sentences"),
            (too_long, f"with a sentence of more than {LONGEST_SENTENCE} tokens"),
        ):
            if number:
                warn_on_first_rank(f"{self._label()}: {number} documents {what} are not used")
        if epochs > 1:
            warn_on_first_rank(
                f"{self._label()}: {self.num_samples} samples are requested, which are made in {epochs} epochs over "
                "its documents"
            )
        if cut:
            warn_on_first_rank(
                f"{self._label()}: samples are made of whole sentences, and {cut / tokens:.1%} of the tokens are cut "
                "off because their sample is full"
            )

    def _refuse_unusable(self, found: UsableDocuments, boundaries: np.ndarray) -> None:
        """Raises UserError if samples are requested and there are none, or if the text has no sentences."""
        sentences = int(boundaries[-1] - boundaries[0])
        filled = int(np.count_nonzero(np.diff(boundaries)))
        if self.num_samples and not found.usable.any():
            raise UserError(f"--data-path {self._label()}: {self._why_unusable(filled, sentences, found)}")
        if sentences == filled > 1:
            longest = int(self.dataset.sequence_lengths[boundaries[0] : boundaries[-1]].max())
            if longest > LONGEST_SENTENCE:
                raise UserError(
                    f"--data-path {self._label()}: {_NO_SENTENCES} (the longest has {longest} tokens; a sample uses at "
                    f"most {self.config.max_tokens} of them)"
                )

    def _why_unusable(self, filled: int, sentences: int, found: UsableDocuments) -> str:
        if not filled:
            return "contains no tokens, so it has no samples; give it a larger share (--split) or other data"
        least = self.config.min_sentences
        if found.too_few_sentences == filled:
            why = _NO_SENTENCES if sentences == filled else f"no document has {least} sentences"
            return f"{why}. Sentence pairs need two sentences of a document; --bert-no-binary-head trains without them"
        return (
            f"none of its {filled} documents is usable: {found.too_few_sentences} have fewer than {least} sentences, "
            f"{found.too_long_sentence} a sentence of more than {LONGEST_SENTENCE} tokens; divide the text with "
            "tools/preprocess_data.py --split-sentences, and what it leaves too long by full stops of its own"
        )

    def _label(self) -> str:
        return f"{self.dataset_path or 'mock data'} ({self.index_split.name} split)"
