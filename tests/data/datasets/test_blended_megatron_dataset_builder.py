"""megatron/data/datasets/blended_megatron_dataset_builder.py: golden blends, and splits without data."""

import hashlib
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.data.datasets.utils import Split


def describe(array):
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "sha256": digest}


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("number", range(3))
def test_golden_blends(golden, blend_prefixes, tokenizer, tmp_path, number, threads):
    case = json.loads((golden / "blended" / "full.json").read_text())[number]
    stored = np.load(golden / "blended" / "full.npz")
    config = GPTDatasetConfig(
        case["seed"],
        case["seq"],
        blend=([str(blend_prefixes / prefix) for prefix in case["prefixes"]], case["weights"]),
        split=case["split"],
        tokenizer=tokenizer,
        path_to_cache=str(tmp_path),
        num_dataset_builder_threads=threads,
    )
    datasets = BlendedMegatronDatasetBuilder(GPTDataset, case["sizes"], lambda: True, config).build()
    for split, dataset in zip(Split, datasets, strict=True):
        expected = case["splits"][split.name]
        if expected is None:
            assert dataset is None
            continue
        assert type(dataset).__name__ == expected["type"]
        assert (len(dataset), dataset.size, dataset.weights) == (expected["len"], expected["size"], expected["weights"])
        for name in ("dataset_index", "dataset_sample_index"):
            assert describe(getattr(dataset, name)) == expected[name]
        for part, part_expected in zip(dataset.datasets, expected["sub"], strict=True):
            assert (len(part), part.num_samples) == (part_expected["len"], part_expected["num_samples"])
            assert describe(part.shuffle_index) == part_expected["shuffle"]
        tokens = stored[f"c{case['case']}_{split.name}_tokens"]
        assert np.array_equal(np.stack([dataset[i]["tokens"] for i in range(len(tokens))]), tokens)


@pytest.fixture
def prefixes(tmp_path, write_documents):
    """Three datasets of 40, 20 and 10 documents of 11 tokens."""
    return [write_documents(tmp_path / name, [[7] * 11] * count) for name, count in (("a", 40), ("b", 20), ("c", 10))]


@pytest.fixture
def build(tmp_path):
    def build_datasets(sizes, **options):
        config = GPTDatasetConfig(
            1, 10, tokenizer=SimpleNamespace(eod=0, vocab_size=9), path_to_cache=str(tmp_path / "cache"), **options
        )
        cls = MockGPTDataset if config.mock else GPTDataset
        return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()

    return build_datasets


def test_one_prefix_is_no_blend(build, prefixes):
    train, valid, test = build([30, 5, 0], blend=(prefixes[:1], None), split="8,1,1")
    assert type(train) is type(valid) is type(test) is GPTDataset
    assert [list(dataset.indices) for dataset in (train, valid, test)] == [
        list(range(32)),
        list(range(32, 36)),
        list(range(36, 40)),
    ]
    assert isinstance(build([30, 0, 0], blend=(prefixes[:1], [1.0]), split="1")[0], BlendedDataset)


def test_a_blend_for_each_split(build, prefixes):
    blends = [(prefixes[:2], [1.0, 3.0]), (prefixes[2:], [1.0]), None]
    train, valid, test = build([40, 5, 5], blend_per_split=blends)
    assert train.weights == [0.25, 0.75]
    assert [part.dataset_path for part in train.datasets] == prefixes[:2]
    assert type(valid) is GPTDataset
    assert len(valid.indices) == 10
    assert test is None


def test_sizes_have_a_surplus_and_ceilings(build, prefixes):
    train = build([100, 0, 0], blend=(prefixes[:2], [1.0, 2.0]), split="1", mid_level_dataset_surplus=0.1)[0]
    assert len(train) == 34 + 67
    assert [part.num_samples for part in train.datasets] == [38, 74]


def test_full_validation_is_one_pass(build, prefixes, caplog):
    valid = build([30, 4, 0], blend=(prefixes, [1.0, 1.0, 1.0]), split="5,5,0", full_validation=True)[1]
    assert len(valid) == sum(len(part) for part in valid.datasets) == 21 + 10 + 5
    assert [part.num_samples for part in valid.datasets] == [None] * 3
    assert "valid split: every sample is used once" in caplog.text


def test_validation_sets_apart(build, prefixes):
    valid = build([10, 6, 0], blend=(prefixes, None), split="5,5,0", multiple_validation_sets=True)[1]
    assert [(type(part), part.dataset_path) for part in valid] == [(GPTDataset, prefix) for prefix in prefixes]
    assert all(len(part) >= 6 for part in valid)
    blends = [(prefixes[:1], None), (prefixes[1:], None), None]
    valid = build([10, 6, 0], blend_per_split=blends, multiple_validation_sets=True, full_validation=True)[1]
    assert [part.num_samples for part in valid] == [None, None]


def test_an_unweighted_blend_is_one_pass_and_says_so_if_more_is_asked(build, prefixes, caplog):
    train = build([1000, 0, 0], blend=(prefixes, None), split="1")[0]
    assert len(train) == sum(len(part) for part in train.datasets) == 43 + 21 + 10
    assert "1000 samples requested, but one pass over the datasets has 74" in caplog.text
    assert len(build([50, 0, 0], blend=(prefixes, None), split="1")[0]) == 50
    assert len(build([None, None, None], blend=(prefixes, None), split="1")[0]) == 74


def test_weight_zero_leaves_a_dataset_out(build, prefixes, caplog):
    train = build([20, 0, 0], blend=(prefixes, [1.0, 0.0, 1.0]), split="1")[0]
    assert [part.dataset_path for part in train.datasets] == [prefixes[0], prefixes[2]]
    assert f"left out of the blend: {prefixes[1]}" in caplog.text


def test_mock_data(build):
    train, valid, test = build([100, None, 10])
    assert all(type(dataset) is MockGPTDataset and len(dataset) > 100 for dataset in (train, valid, test))


def test_other_ranks_build_nothing(prefixes, tmp_path):
    config = GPTDatasetConfig(1, 10, blend=(["not there"], None), split="1")
    assert BlendedMegatronDatasetBuilder(GPTDataset, [1, 1, 1], lambda: False, config).build() == [None] * 3


def test_a_share_of_zero_is_no_data(build, prefixes):
    train, valid, test = build([10, 10, 10], blend=(prefixes[:1], None), split="'90,10,0'")
    assert len(train) >= 10
    assert valid is not None
    assert test is None


@pytest.mark.parametrize("weights", [None, [1.0]])
def test_samples_of_an_empty_split_are_refused(build, prefixes, weights):
    # One document in a thousand of ten documents is none.
    with pytest.raises(UserError, match=r"test split of .*c: \d samples are requested, but it contains none.*--split"):
        build([10, 10, 5], blend=(prefixes[2:], weights), split="90,9.9,0.1")


@pytest.mark.parametrize("size", [0, None])
def test_an_empty_split_is_left_out_and_said(build, prefixes, caplog, size):
    with caplog.at_level(logging.WARNING):
        train, _, test = build([10, 10, size], blend=(prefixes[2:], None), split="90,9.9,0.1")
    assert train is not None
    assert test is None
    assert f"test split of {prefixes[2]}: contains no samples and is left out" in caplog.text


def test_an_empty_part_of_a_blend(build, prefixes, caplog):
    split = "90,5,5"  # 5% of 10 documents: none in the test split, by rounding half to even
    test = build([None, None, None], blend=(prefixes, None), split=split)[2]
    assert [part.dataset_path for part in test.datasets] == prefixes[:2]
    assert "test split of" in caplog.text
    with pytest.raises(UserError, match=r"test split of .*c: \d+ samples are requested"):
        build([10, 10, 10], blend=(prefixes, [1.0, 1.0, 1.0]), split=split)


def test_documents_without_tokens_are_an_empty_split(build, tmp_path, write_documents):
    prefix = write_documents(tmp_path / "hollow", [[]] * 20)
    with pytest.raises(UserError, match=r"train split of .*hollow"):
        build([10, 0, 0], blend=([prefix], None), split="1")


def test_fewer_tokens_than_a_sample_are_repeated_or_left_out(build, tmp_path, write_documents, caplog):
    prefix = write_documents(tmp_path / "short", [[1, 2, 3]])
    assert len(build([5, 0, 0], blend=([prefix], None), split="1")[0]) >= 5
    assert build([None, 0, 0], blend=([prefix], None), split="1")[0] is None
    assert "contains no samples" in caplog.text


def test_missing_files_are_named(build, prefixes, tmp_path):
    with pytest.raises(UserError, match=r"--data-path .*nowhere: no file .*nowhere\.idx"):
        build([1, 0, 0], blend=([*prefixes, str(tmp_path / "nowhere")], None), split="1")
    with pytest.raises(UserError, match=r"no file 0\.3\.idx \(a weight\?"):
        build([1, 0, 0], blend=(["0.3", *prefixes[:2]], None), split="1")
    with pytest.raises(UserError, match="sizes"):
        build([1, 0], blend=(prefixes, None), split="1")


def test_calls_of_older_releases(tokenizer):
    """Release 0.5 gives the config alone, 0.5 and 0.6 the words of blends, later ones settings that are gone."""
    config = GPTDatasetConfig(1, 4, mock=True, tokenizer=tokenizer, is_built_on_rank=lambda: False, vocab_size=9)
    assert BlendedMegatronDatasetBuilder(MockGPTDataset, [1, 1, 1], config).build() == [None] * 3
    config = GPTDatasetConfig(1, 4, mock=True, tokenizer=tokenizer, renormalize_blend_weights=True)
    assert len(BlendedMegatronDatasetBuilder(MockGPTDataset, [3, 1, 1], config).build()[0]) >= 3
    words = GPTDatasetConfig(1, 4, blend=["0.3", "a", "0.7", "b"], split="1", tokenizer=tokenizer)
    assert words.blend == (["a", "b"], [0.3, 0.7])
    words = GPTDatasetConfig(1, 4, blend_per_split=[["a"], None, ["b", "c"]], tokenizer=tokenizer)
    assert words.blend_per_split == [(["a"], None), None, (["b", "c"], None)]
    with pytest.raises(UserError, match="object storage"):
        GPTDatasetConfig(1, 4, mock=True, tokenizer=tokenizer, s3_cache_path="s3://x")
    with pytest.raises(UserError, match="was given no config"):
        BlendedMegatronDatasetBuilder(MockGPTDataset, [1, 1, 1], lambda: True)
