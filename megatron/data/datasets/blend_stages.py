"""Stages of a blend whose weights change at given samples (--data-stages): their file, and the order of samples.

Each stage draws from its datasets like a blend (blending.py). A dataset that several stages use continues where the
previous stage stopped. Its samples are drawn in passes. Each pass has its own permutation of the whole dataset, so no
sample is repeated within a pass. Everything is a function of the sample's number, so a run can resume anywhere.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json, read_regular_file
from megatron.data.datasets.blending import BlendOrder
from megatron.data.datasets.utils import Blend, check_weights, get_blend_from_list, normalize

_KEYS = {"from_sample", "data_path"}
_RULES = {"cap", "temperature"}


@dataclass(frozen=True)
class BlendStage:
    """A stage: the number of its first sample in the run, and the prefixes with their weights."""

    first_sample: int
    prefixes: tuple[str, ...]
    weights: tuple[float, ...]


def read_stages_file(path: str) -> list[BlendStage]:
    """Reads the stages from a JSON file: a list of objects with `from_sample` and `data_path`, the words of
    --data-path in a list or a text, and optionally the rules of `mixed_weights`. Raises UserError that names the file
    and the stage."""
    try:
        content = parse_json(read_regular_file(path))
    except OSError as error:
        raise UserError(f"--data-stages {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--data-stages {path}: not JSON: {error}") from None
    if not isinstance(content, list) or not content:
        raise UserError(f"--data-stages {path}: expected a list of stages, each with {', '.join(sorted(_KEYS))}")
    stages: list[BlendStage] = []
    for number, entry in enumerate(content, 1):
        try:
            stages.append(_stage(entry))
        except (UserError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"--data-stages {path}: stage {number}: {error}") from None
        expected = "0" if number == 1 else f"more than {stages[-2].first_sample}"
        wrong = stages[-1].first_sample != 0 if number == 1 else stages[-1].first_sample <= stages[-2].first_sample
        if wrong:
            found = stages[-1].first_sample
            raise UserError(f"--data-stages {path}: stage {number}: from_sample is {found}; it must be {expected}")
    return stages


def _stage(entry: object) -> BlendStage:
    if not isinstance(entry, dict) or not _KEYS <= entry.keys() <= _KEYS | _RULES:
        raise UserError(
            f"expected an object with the keys {', '.join(sorted(_KEYS))} (also: {', '.join(sorted(_RULES))}), not "
            + json.dumps(entry)[:80]
        )
    first, words = entry["from_sample"], entry["data_path"]
    if not isinstance(words, str | list):
        raise UserError(f"data_path is {json.dumps(words)[:80]}, not a text or a list of words")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise UserError(f"from_sample is {json.dumps(first)}, not a number of samples")
    blend = get_blend_from_list(words.split() if isinstance(words, str) else [str(word) for word in words], "data_path")
    if blend is None or not blend[0]:
        raise UserError("data_path has no prefix")
    prefixes, weights = blend
    if len(set(prefixes)) < len(prefixes):
        raise UserError("a prefix is named twice")
    if weights is None and len(prefixes) > 1:
        raise UserError("data_path needs a weight before each prefix")
    rules: dict[str, float] = {}
    for name in sorted(_RULES & entry.keys()):
        value = entry[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"{name} is {json.dumps(value)}, not a number above 0")
        rules[name] = value
    if rules and weights is None:
        raise UserError(f"{', '.join(rules)} changes weights, and data_path has none")
    if weights is None:
        return BlendStage(first, tuple(prefixes), (1.0,))
    try:
        mixed = mixed_weights(check_weights(weights), **rules)
    except OverflowError:
        raise UserError(f"temperature {rules['temperature']} makes weights too large; give a larger one") from None
    return BlendStage(first, tuple(prefixes), tuple(normalize(check_weights(mixed))))


def mixed_weights(weights: Sequence[float], cap: float = math.inf, temperature: float = 1.0) -> list[float]:
    """Returns min(w, cap) ** (1 / temperature) for each weight w, not normalized: the mixing rules of Raffel et al.
    2020, section 3.5.2, if weights are sizes of the datasets. A temperature above 1 makes the shares more alike."""
    return [min(weight, cap) ** (1 / temperature) for weight in weights]


def prefixes_of(stages: Sequence[BlendStage]) -> list[str]:
    """Returns the prefixes of all stages, each once, in the order in which they appear."""
    return list(dict.fromkeys(prefix for stage in stages for prefix in stage.prefixes))


def last_blend(stages: Sequence[BlendStage]) -> Blend:
    """Returns the blend of the last stage, which validation and test data use."""
    return list(stages[-1].prefixes), list(stages[-1].weights)


def blend_until(stages: Sequence[BlendStage], samples: int) -> Blend:
    """Returns the prefixes of all stages, and the samples that the weights plan for each among the first `samples`
    ones."""
    planned = dict.fromkeys(prefixes_of(stages), 0.0)
    ends = [*(stage.first_sample for stage in stages[1:]), samples]
    for stage, end in zip(stages, ends, strict=True):
        for prefix, weight in zip(stage.prefixes, stage.weights, strict=True):
            planned[prefix] += max(0, min(end, samples) - stage.first_sample) * weight
    return list(planned), list(planned.values())


class StageOrder:
    """The dataset of each of `size` samples, and the sample's number in that dataset, counted over all stages."""

    def __init__(self, stages: Sequence[BlendStage], size: int) -> None:
        self.prefixes, self.size, self._all_stages = prefixes_of(stages), size, stages
        self.stages = [stage for stage in stages if stage.first_sample < size]
        self.starts = [stage.first_sample for stage in self.stages]
        ends = [*self.starts[1:], size]
        self.orders = [
            BlendOrder(self._weights(stage), end - start)
            for stage, start, end in zip(self.stages, self.starts, ends, strict=True)
        ]
        counts = [order.counts() for order in self.orders]
        self.before = np.concatenate([np.zeros((1, len(self.prefixes)), np.int64), np.cumsum(counts, axis=0)])
        """int64 [stages + 1, prefixes]: samples drawn from each dataset before each stage; the last row: by all
        stages."""

    def _weights(self, stage: BlendStage) -> np.ndarray:
        share = dict(zip(stage.prefixes, stage.weights, strict=True))
        return np.array([share.get(prefix, 0.0) for prefix in self.prefixes])

    def planned(self, consumed: int) -> np.ndarray:
        """Returns the samples that the weights plan for each prefix among the first `consumed` ones, float64
        [prefixes]."""
        return np.array(blend_until(self._all_stages, consumed)[1])

    def stage_of(self, sample: int) -> int:
        """Returns the index of a sample's stage."""
        return bisect_right(self.starts, sample) - 1

    def locate(self, sample: int) -> tuple[int, int]:
        """Returns the index of the sample's prefix, and the number of samples drawn from it before."""
        stage = self.stage_of(sample)
        dataset, number = self.orders[stage].locate(sample - self.starts[stage])
        return dataset, int(self.before[stage, dataset]) + number

    def taken(self, consumed: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Returns the stage of the last of `consumed` samples, and two counts of samples per prefix, int64 [prefixes]:
        those drawn in this stage, and those drawn in the whole run."""
        stage = self.stage_of(max(consumed - 1, 0))
        of_stage = self.orders[stage].taken(consumed - self.starts[stage])
        return stage, of_stage, self.before[stage] + of_stage
