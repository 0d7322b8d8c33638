"""A small GPT dataset on disk."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder


@pytest.fixture
def build_dataset(tmp_path):
    """A blend of two prefixes of random documents with eod 0, `size` samples of 16 tokens."""

    def build(size, **options):
        random = np.random.default_rng(0)
        prefixes = [str(tmp_path / name) for name in ("a", "b")]
        for prefix in prefixes:
            with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
                for length in random.integers(2, 60, 80):
                    builder.add_document(np.append(random.integers(1, 500, length - 1), 0), [int(length)])
                builder.finalize(f"{prefix}.idx")
        config = GPTDatasetConfig(
            1,
            16,
            blend=(prefixes, [0.3, 0.7]),
            split="1",
            tokenizer=SimpleNamespace(eod=0),
            path_to_cache=str(tmp_path / "cache"),
            **{"create_attention_mask": False} | options,
        )
        return BlendedMegatronDatasetBuilder(GPTDataset, [size, 0, 0], lambda: True, config).build()[0]

    return build
