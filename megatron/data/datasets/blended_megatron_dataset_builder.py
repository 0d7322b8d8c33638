"""Builds the train, valid and test datasets of a run from its data configuration."""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.warn import warn_on_first_rank
from megatron.data.datasets import object_store
from megatron.data.datasets.blend_stages import BlendStage, StageOrder
from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.staged_blend import StagedBlend
from megatron.data.datasets.utils import Blend, Split, normalize, split_bounds

TopLevelDataset = MegatronDataset | BlendedDataset | StagedBlend

_WHOLE = (0.0, 1.0)


class BlendedMegatronDatasetBuilder:
    """Builds train, valid and test datasets.

    Args:
        cls: the dataset class, such as GPTDataset.
        sizes: samples requested of each split; None: one pass over the data.
        is_built_on_rank: whether this process builds. If it returns False, `build` returns [None, None, None].
        config: the data configuration. If it directly follows `sizes`, its own field names the ranks that build. No
        process waits for another (index_cache.py).
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool] | BlendedMegatronDatasetConfig,
        config: BlendedMegatronDatasetConfig | None = None,
    ) -> None:
        if isinstance(is_built_on_rank, BlendedMegatronDatasetConfig):  # as scripts of release 0.5 call it
            config, is_built_on_rank = is_built_on_rank, is_built_on_rank.is_built_on_rank or (lambda: True)
        if config is None:
            raise UserError("BlendedMegatronDatasetBuilder was given no config")
        if len(sizes) != len(Split):
            raise UserError(f"sizes: expected one for each of train, valid and test, got {len(sizes)}")
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        if config.full_validation:
            self.sizes[Split.valid.value] = None
        self._open = functools.cache(self._open_low_level)

    def build(self) -> list[Any]:
        """Returns [train, valid, test]. Each is a dataset, or None for a split without data. With
        multiple_validation_sets, valid is a list of datasets.

        Raises UserError if samples are requested of a split that has a share of the data but contains no tokens.
        """
        if not self.is_built_on_rank():
            return [None] * len(Split)
        return [self._build_split(split) for split in Split]

    def _build_split(self, split: Split) -> object:
        config, size = self.config, self.sizes[split.value]
        if config.mock:
            return self._build_one(None, self._share(split), size, split)
        if split is Split.train and config.blend_stages is not None:
            return self._build_stages(config.blend_stages, self._share(split), size, split)
        blend = config.blend_per_split[split.value] if config.blend_per_split is not None else config.blend
        share = self._share(split)
        if blend is None or share is None:
            return None
        prefixes, weights = blend
        if split is Split.valid and config.multiple_validation_sets:
            return self._build_each(prefixes, share, [size] * len(prefixes), split)
        if len(prefixes) == 1 and (weights is None or config.blend_per_split is not None):
            return self._build_one(prefixes[0], share, size, split)
        return self._build_blend(blend, share, size, split)

    def _build_blend(
        self, blend: Blend, share: tuple[float, float], size: int | None, split: Split
    ) -> TopLevelDataset | None:
        prefixes, weights = blend
        if weights is not None and size is not None:
            return self._build_weighted(prefixes, weights, share, size, split)
        if weights is not None:
            warn_on_first_rank(f"{split.name} split: every sample is used once, so the weights have no effect")
        parts = self._build_each(prefixes, share, [None] * len(prefixes), split)
        sources = [number for number, dataset in enumerate(parts) if dataset is not None]
        datasets = [dataset for dataset in parts if dataset is not None]
        if not datasets:
            self._refuse_or_leave_out(f"the {len(prefixes)} datasets", size, split)
            return None
        if size is None:
            return BlendedDataset(datasets, None, None, self.config, sources)
        lengths = [len(dataset) for dataset in datasets]
        if sum(lengths) < size:
            warn_on_first_rank(
                f"{split.name} split: {size} samples requested, but one pass over the datasets has {sum(lengths)}; "
                "give weights to repeat them"
            )
        return BlendedDataset(datasets, lengths, min(size, sum(lengths)), self.config, sources)

    def _build_weighted(
        self, prefixes: list[str], weights: list[float], share: tuple[float, float], size: int, split: Split
    ) -> BlendedDataset | None:
        pairs = [(prefix, weight) for prefix, weight in zip(prefixes, weights, strict=True) if weight > 0]
        if len(pairs) < len(prefixes):
            unused = [prefix for prefix, weight in zip(prefixes, weights, strict=True) if weight == 0]
            warn_on_first_rank(f"datasets with weight 0 are left out of the blend: {', '.join(unused)}")
        numbers = [number for number, weight in enumerate(weights) if weight > 0]
        prefixes = [prefix for prefix, _ in pairs]
        shares = normalize([weight for _, weight in pairs])
        wanted = [math.ceil(size * part) for part in shares]
        surplus = 1 + self.config.mid_level_dataset_surplus
        datasets = self._build_each(prefixes, share, [math.ceil(count * surplus) for count in wanted], split)
        every = zip(datasets, shares, numbers, strict=True)
        kept = [(dataset, part, number) for dataset, part, number in every if dataset is not None]
        if not kept:
            return None
        parts, of_each, sources = zip(*kept, strict=True)
        return BlendedDataset(parts, of_each, sum(wanted), self.config, sources)

    def _build_stages(
        self, stages: Sequence[BlendStage], share: tuple[float, float] | None, size: int | None, split: Split
    ) -> StagedBlend | None:
        if share is None or not size:
            return None
        order = StageOrder(stages, size)
        for stage in stages[len(order.stages) :]:
            warn_on_first_rank(f"--data-stages: the run ends before the stage from sample {stage.first_sample}")
        used = order.before[-1].tolist()
        passes: list[list[MegatronDataset]] = []
        for prefix, count in zip(order.prefixes, used, strict=True):
            passes.append([])
            while count and (not passes[-1] or len(passes[-1]) * len(passes[-1][0]) < count):
                config = copy.copy(self.config)
                config.random_seed = (self.config.random_seed + len(passes[-1])) % 2**32
                dataset = self._build_one(prefix, share, None, split, config)
                if dataset is None:
                    raise UserError(f"--data-stages: {prefix} has no sample in the {split.name} split")
                passes[-1].append(dataset)
            if count:
                rounds = count / len(passes[-1][0])
                warn_on_first_rank(f"--data-stages: {count} samples of {prefix}, {rounds:.2f} passes over its data")
        return StagedBlend(order, passes, size)

    def _build_each(
        self, prefixes: list[str], share: tuple[float, float], sizes: Sequence[int | None], split: Split
    ) -> list[MegatronDataset | None]:
        def build(prefix: str, size: int | None) -> MegatronDataset | None:
            return self._build_one(prefix, share, size, split)

        with ThreadPoolExecutor(self.config.num_dataset_builder_threads) as pool:
            return list(pool.map(build, prefixes, sizes))

    def _build_one(
        self,
        prefix: str | None,
        share: tuple[float, float] | None,
        size: int | None,
        split: Split,
        config: BlendedMegatronDatasetConfig | None = None,
    ) -> MegatronDataset | None:
        config = config or self.config
        if share is None:
            return None
        low_level = self._open(prefix)
        indices = range(*split_bounds(share, self.cls.numel_low_level_dataset(low_level)))
        if not self.cls.is_empty(low_level, indices, config, split):
            dataset = self.cls(low_level, prefix, indices, size, split, config)
            if len(dataset):
                return dataset
        self._refuse_or_leave_out(prefix or "mock data", size, split)
        return None

    def _refuse_or_leave_out(self, what: str, size: int | None, split: Split) -> None:
        """Handles a split with a share of the data that contains no samples: an error if samples are requested of
        it."""
        if size:
            raise UserError(
                f"{split.name} split of {what}: {size} samples are requested, but it contains none; give it a larger "
                f"share (--split {self.config.split}) or other data, or request no samples"
            )
        warn_on_first_rank(f"{split.name} split of {what}: contains no samples and is left out")

    def _share(self, split: Split) -> tuple[float, float] | None:
        if self.config.blend_per_split is not None:
            return _WHOLE
        assert self.config.split_matrix is not None
        return self.config.split_matrix[split.value]

    def _open_low_level(self, prefix: str | None) -> object:
        if prefix is not None:
            for path in self.cls.files_of(prefix):
                if not (object_store.exists(path) if object_store.is_url(path) else Path(path).is_file()):
                    raise UserError(f"--data-path {prefix}: no file {path}{_weight_hint(prefix)}")
        return self.cls.build_low_level_dataset(prefix, self.config)


def _weight_hint(prefix: str) -> str:
    try:
        float(prefix)
    except ValueError:
        return ""
    return " (a weight? An odd number of words is a list of prefixes without weights)"
