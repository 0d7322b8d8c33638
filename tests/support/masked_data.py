"""Data sets with masked words: usual settings, and such a data set of random documents."""

from typing import Any

import numpy as np

from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

MASKING = {
    "masking_probability": 0.15,
    "short_sequence_probability": 0.1,
    "masking_max_ngram": 3,
    "masking_do_full_word": True,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
}


def random_documents() -> list[list[list[int]]]:
    """Twenty documents of nine sentences."""
    random = np.random.default_rng(1)
    return [[random.integers(0, 90, n).tolist() for n in random.integers(1, 12, 9)] for _ in range(20)]


def pieces(count: int) -> dict[int, str]:
    """A vocabulary in which every third token continues a word."""
    return {i: f"##{i}" if i % 3 == 0 else str(i) for i in range(count)}


def build_masked(kind: type, config_class: type, prefix: object, samples: int, **fields: Any) -> Any:
    """The training split of a prefix, with much masking and many short samples unless the fields say otherwise."""
    usual = {"random_seed": 5, "sequence_length": 24, "split": "1", "blend": ([str(prefix)], None)}
    much = {"masking_probability": 0.3, "short_sequence_probability": 0.3}
    config = config_class(**MASKING | usual | much | fields)
    return BlendedMegatronDatasetBuilder(kind, [samples, 0, 0], lambda: True, config).build()[0]
