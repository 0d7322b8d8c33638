"""The data configuration that all datasets of a run share: files, splits and the folder of index caches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.warn import warn_on_first_rank
from megatron.data.datasets.blend_stages import BlendStage
from megatron.data.datasets.utils import (
    DEFAULT_SPLIT,
    Blend,
    Split,
    SplitMatrix,
    check_weights,
    get_blend_from_list,
    parse_split,
    split_matrix,
)


@dataclass
class BlendedMegatronDatasetConfig:
    """The data of a run. Give `blend` with `split`, or `blend_per_split`, or neither for mock data.

    Raises UserError if values contradict each other.
    """

    random_seed: int
    """Seed of all shuffles; the same for all datasets and splits."""

    sequence_length: int
    """Tokens of a sample."""

    blend: Blend | None = None
    """Prefixes, and their weights or None. Each dataset is divided by `split`."""

    blend_per_split: list[Blend | None] | None = None
    """A blend for each of train, valid and test. Its datasets are used whole. None: no data for this split."""

    multiple_validation_sets: bool | None = None
    """Build a list of the datasets of the validation blend, which must have no weights."""

    full_validation: bool | None = None
    """Validate on one pass over the validation data, regardless of the number of samples requested."""

    split: str | None = None
    """Shares of train, valid and test, such as "969,30,1", the default, which is logged when it is used."""

    split_matrix: SplitMatrix | None = field(init=False, default=None)
    """Begin and end of each split's share in [0, 1], None for an empty one. Follows from `split`."""

    num_dataset_builder_threads: int = 1
    """Number of datasets of a blend that are built in parallel."""

    path_to_cache: str | None = None
    """Folder for index caches. None: `<prefix>/cache` next to each dataset, and no cache for blends."""

    mmap_bin_files: bool = True
    """Map .bin files into memory instead of reading from them."""

    blend_stages: list[BlendStage] | None = None
    """Stages of the training data, which replace its blend. Validation and test data are those of `blend`."""

    mock: bool = False
    """Use made-up data. True if no blend is given."""

    tokenizer: Any = None
    """Source of the special ids `eod` and `pad`."""

    mid_level_dataset_surplus: float = 0.005
    """Fraction by which each dataset of a weighted blend is built larger than its share, as a margin for rounding."""

    allow_ambiguous_pad_tokens: bool | None = False
    """Treat the tokenizer's pad id as padding even if another special token has the same id."""

    fast_cache_load: bool = False
    """Accepted without effect: opening a dataset is fast, and files are always checked."""

    defer_npy_index_mmap: bool = False
    """Accepted without effect: index arrays are always mapped, and read at the first access."""

    num_ids: int | None = None
    """Number of ids that the model knows. A sample with another id raises UserError, which names the file. None: not
    checked."""

    renormalize_blend_weights: bool = False
    """Accepted without effect, for scripts of release 0.9: weights are always divided by their sum."""

    is_built_on_rank: Callable[[], bool] | None = None
    """For scripts of release 0.5: see BlendedMegatronDatasetBuilder. Later ones give it to the builder."""

    def __post_init__(self) -> None:
        self.blend = _parsed(self.blend)
        if self.blend_per_split is not None:
            self.blend_per_split = [_parsed(blend) for blend in self.blend_per_split]
        if self.sequence_length < 1:
            raise UserError(f"sequence_length {self.sequence_length}: expected 1 or more")
        if not 0 <= self.random_seed < 2**32:
            raise UserError(f"--seed {self.random_seed}: data is shuffled with a seed between 0 and 2^32 - 1")
        if self.num_dataset_builder_threads < 1:
            raise UserError(f"--num-dataset-builder-threads {self.num_dataset_builder_threads}: expected 1 or more")
        if self.blend_per_split is not None and not any(self.blend_per_split):
            self.blend_per_split = None
        if self.blend is not None and self.blend_per_split is not None:
            raise UserError("give --data-path or data for each split (--train-data-path ...), not both")
        for blend in [self.blend, *(self.blend_per_split or [])]:
            _check_blend(blend)
        if self.blend_per_split is not None:
            self._take_blend_per_split()
        else:
            self._take_split()

    def _take_blend_per_split(self) -> None:
        assert self.blend_per_split is not None
        if self.split is not None:
            raise UserError(f"--split {self.split}: data given for each split is used whole; leave --split out")
        if len(self.blend_per_split) != len(Split):
            raise UserError(f"blend_per_split: expected {len(Split)} entries, got {len(self.blend_per_split)}")
        if self.multiple_validation_sets:
            valid = self.blend_per_split[Split.valid.value]
            if valid is not None and valid[1] is not None:
                raise UserError("--multiple-validation-sets: leave the weights out of the validation data")

    def _take_split(self) -> None:
        if self.multiple_validation_sets and (self.blend is None or self.blend[1] is not None):
            raise UserError("--multiple-validation-sets: needs data without weights (--valid-data-path or --data-path)")
        if self.blend is None:
            if not self.mock:
                warn_on_first_rank("no data is given (--data-path): using made-up data, as with --mock-data")
            self.mock = True
            self.split = "1,1,1"
        elif self.split is None:
            self.split = DEFAULT_SPLIT
            warn_on_first_rank(
                f"no --split given: data is divided into training, validation and test data as {DEFAULT_SPLIT}"
            )
        self.split_matrix = split_matrix(parse_split(self.split))


def _parsed(blend: Any) -> Blend | None:
    """Returns the blend of a list of words, which scripts of releases 0.5 and 0.6 give; returns any other blend
    unchanged."""
    words = isinstance(blend, list) and all(isinstance(word, str) for word in blend)
    return get_blend_from_list(blend) if words else blend


def _check_blend(blend: Blend | None) -> None:
    if blend is None:
        return
    prefixes, weights = blend
    if not prefixes:
        raise UserError("--data-path: expected at least one prefix")
    if weights is not None:
        if len(weights) != len(prefixes):
            raise UserError(f"--data-path: {len(weights)} weights for {len(prefixes)} prefixes")
        check_weights(weights)
