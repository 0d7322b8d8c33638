"""megatron/data/datasets/gpt_dataset.py: indices, samples and masks equal to Megatron-LM's."""

import hashlib
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import mock_data

from megatron.core.exceptions import UserError
from megatron.data.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset
from megatron.data.datasets.index_cache import IndexCache
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.datasets.utils import Split, split_bounds

INDICES = ("document_index", "sample_index", "shuffle_index")
FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "drop_last_partial_validation_sequence")
CASES = (0, 2, 5, 9, 11)


def describe(array):
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "sha256": digest}


def golden_case(golden, number):
    cases = json.loads((golden / "gpt_dataset" / "cases.json").read_text())
    return next(case for case in cases if case["case"] == number)


@pytest.fixture
def build(golden, tokenizer, tmp_path):
    def build_split(case, split, **changes):
        prefix = str(golden / "corpus" / "pp" / case["prefix"])
        flags = {name: case[name] for name in FLAGS if name in case} | changes
        config = GPTDatasetConfig(
            case["seed"],
            case["seq"],
            blend=([prefix], None),
            split=case["split"],
            tokenizer=tokenizer,
            path_to_cache=str(tmp_path / "cache"),
            **flags,
        )
        low_level = IndexedDataset(prefix)
        bounds = split_bounds(config.split_matrix[split.value], len(low_level))
        return GPTDataset(low_level, prefix, range(*bounds), case["sizes"][split.value], split, config)

    return build_split


@pytest.mark.parametrize("split", list(Split), ids=lambda split: split.name)
@pytest.mark.parametrize("number", CASES)
def test_golden_indices_and_all_samples(golden, build, number, split):
    case = golden_case(golden, number)
    expected = case["splits"][split.name]
    dataset = build(case, split)
    assert (len(dataset), dataset.num_epochs) == (expected["len"], expected["num_epochs"])
    assert [dataset.indices[0], dataset.indices[-1] + 1] == expected["indices"]
    for name in INDICES:
        assert describe(getattr(dataset, name)) == expected[name]
    digest = hashlib.sha256()
    for i in range(len(dataset)):
        item = dataset[i]
        assert item["sample_id"] == i
        digest.update(item["tokens"].numpy().tobytes())
        digest.update(item["labels"].numpy().tobytes())
    assert digest.hexdigest() == expected["all_samples_sha256_tokens_then_labels_int64le"]


@pytest.mark.parametrize("split", list(Split), ids=lambda split: split.name)
@pytest.mark.parametrize("number", CASES)
def test_golden_fields(golden, build, number, split):
    case = golden_case(golden, number)
    stored = np.load(golden / "gpt_dataset" / f"case{number:02d}.npz")
    dataset = build(case, split)
    items = [dataset[i] for i in range(len(stored[f"{split.name}_tokens"]))]
    assert np.array_equal(np.stack([item["tokens"] for item in items]), stored[f"{split.name}_tokens"][:, :-1])
    for name in ("labels", "loss_mask", "position_ids"):
        if f"{split.name}_{name}" in stored:
            assert np.array_equal(np.stack([item[name] for item in items]), stored[f"{split.name}_{name}"])
    if f"{split.name}_attention_mask" in stored:
        masks = np.stack([item["attention_mask"].numpy() for item in items[:10]])
        assert masks.shape == (10, 1, case["seq"], case["seq"])
        assert np.array_equal(np.packbits(masks), stored[f"{split.name}_attention_mask"])
    types = {
        name: item.dtype for name, item in items[0].items() if name in ("tokens", "labels", "loss_mask", "position_ids")
    }
    assert types == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }


@pytest.mark.parametrize("number", range(2))
def test_golden_mock(golden, number, monkeypatch):
    monkeypatch.setattr(MockGPTLowLevelDataset, "num_documents", mock_data.NUM_DOCUMENTS)
    case = json.loads((golden / "gpt_dataset" / "mock.json").read_text())[number]
    tokenizer = SimpleNamespace(vocab_size=case["vocab_size"], eod=case["eod"])
    config = GPTDatasetConfig(case["seed"], case["seq"], tokenizer=tokenizer)
    assert config.mock
    assert config.split == case["split"]
    low_level = MockGPTDataset.build_low_level_dataset(None, config)
    assert describe(low_level.sequence_lengths)["sha256"] == case["lengths_sha256"]
    for split in Split:
        bounds = split_bounds(config.split_matrix[split.value], MockGPTDataset.numel_low_level_dataset(low_level))
        dataset = MockGPTDataset(low_level, None, range(*bounds), case["sizes"][split.value], split, config)
        expected = case["splits"][split.name]
        assert len(dataset) == expected["len"]
        for name in INDICES:
            assert describe(getattr(dataset, name)) == expected[name]
        for i, sample in enumerate(expected["samples"]):
            assert dataset[i]["tokens"].tolist() == sample[:-1]
            assert dataset[i]["labels"].tolist() == sample[1:]


def test_boundaries_say_what_the_mask_says(golden, build):
    case = golden_case(golden, 9)
    with_mask, without = build(case, Split.train), build(case, Split.train, create_attention_mask=False)
    several = 0
    for i in range(60):
        item, lean = with_mask[i], without[i]
        assert "attention_mask" not in lean
        assert lean["cu_seqlens"].shape == (case["seq"] + 1,)
        boundaries = lean["cu_seqlens"][: int((lean["cu_seqlens"] < case["seq"]).sum()) + 1]
        assert lean["max_seqlen"] == boundaries.diff().max()
        document = torch.bucketize(torch.arange(case["seq"]), boundaries[1:], right=True)
        allowed = (document[:, None] == document[None]) & torch.ones(case["seq"], case["seq"]).tril().bool()
        assert torch.equal(item["attention_mask"][0], ~allowed)
        several += len(boundaries) > 2
    assert several > 10


def test_flags_apart(golden, build):
    case = golden_case(golden, 9)
    plain = build({k: v for k, v in case.items() if k not in FLAGS}, Split.train, create_attention_mask=False)
    positions = build(case, Split.train, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False)
    assert set(plain[0]) == set(positions[0]) == {"tokens", "labels", "loss_mask", "position_ids", "sample_id"}
    assert any(not torch.equal(plain[i]["position_ids"], positions[i]["position_ids"]) for i in range(20))
    loss = build(case, Split.train, reset_attention_mask=False, reset_position_ids=False)
    for i in range(20):
        assert torch.equal(loss[i]["loss_mask"], (loss[i]["tokens"] != 0).float())
        assert loss[i]["position_ids"].tolist() == list(range(case["seq"]))


def test_item_none_fills_a_batch_without_loss(golden, build):
    dataset = build(golden_case(golden, 0), Split.train)
    item = dataset[None]
    assert torch.equal(item["tokens"], dataset[0]["tokens"])
    assert item["loss_mask"].sum() == 0
    assert item["sample_id"] == -1


def test_items_do_not_share_what_can_be_changed(golden, build):
    dataset = build(golden_case(golden, 0), Split.train)
    before = {name: value.clone() for name, value in dataset[3].items()}
    item = dataset[3]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        item[name].fill_(7)
    assert all(torch.equal(value, before[name]) for name, value in dataset[3].items())


@pytest.mark.parametrize("idx", [-1, 499])
def test_samples_beyond_the_end(golden, build, idx):
    with pytest.raises(IndexError, match=f"sample {idx} requested, there are 499"):
        build(golden_case(golden, 0), Split.train)[idx]


@pytest.fixture
def small(tmp_path, write_documents):
    def build_small(
        documents, sequence_length, num_samples=None, tokenizer=None, split=Split.train, indices=None, **options
    ):
        prefix = write_documents(tmp_path / "small", documents)
        tokenizer = tokenizer or SimpleNamespace(eod=0)
        config = GPTDatasetConfig(1, sequence_length, blend=([prefix], None), split="1", tokenizer=tokenizer, **options)
        low_level = IndexedDataset(prefix)
        return GPTDataset(
            low_level, prefix, range(len(low_level)) if indices is None else indices, num_samples, split, config
        )

    return build_small


def test_without_an_extra_token_the_last_label_is_padding(small):
    dataset = small([[5, 6, 7, 8]], 4, add_extra_token_to_sequence=False)
    assert dataset[0]["tokens"].tolist() == [5, 6, 7, 8]
    assert dataset[0]["labels"].tolist() == [6, 7, 8, 0]
    assert dataset[0]["loss_mask"].tolist() == [1, 1, 1, 0]


def test_a_partial_sample_is_padded(small):
    dataset = small([[5, 6, 7, 8, 9, 4]], 4, split=Split.valid, drop_last_partial_validation_sequence=False)
    items = {tuple(dataset[i]["tokens"].tolist()): dataset[i] for i in range(len(dataset))}
    assert set(items) == {(5, 6, 7, 8), (9, 4, 0, 0)}
    assert items[9, 4, 0, 0]["labels"].tolist() == [4, 0, 0, 0]
    assert items[9, 4, 0, 0]["loss_mask"].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("tokenizer", "options", "masked"),
    [
        (SimpleNamespace(eod=0, pad=6), {}, True),
        (SimpleNamespace(eod=6, pad=6), {}, False),
        (SimpleNamespace(eod=6, pad=6), {"allow_ambiguous_pad_tokens": True}, True),
        (SimpleNamespace(eod=0, pad=6, special_tokens_dict={"unk_token": 6, "pad_token": 6}), {}, False),
        (SimpleNamespace(eod=0, pad=6, special_tokens_dict={"pad_token": 6}), {}, True),
        (SimpleNamespace(eod=0, pad=None), {}, False),
    ],
)
def test_an_ambiguous_pad_id_does_not_silence_tokens(small, tokenizer, options, masked):
    dataset = small([[5, 6, 7, 8, 9]], 4, tokenizer=tokenizer, **options)
    assert dataset[0]["loss_mask"].tolist() == [0.0 if masked else 1.0, 1, 1, 1]
    assert dataset[0]["tokens"].tolist() == [5, 0 if masked else 6, 7, 8]


def test_several_epochs_are_said_once(small, caplog):
    for _ in range(2):
        small([[1] * 50], 5, num_samples=32)
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert "32 samples are 3.2 epochs over its 50 tokens" in said[0]


def test_no_tokens_is_an_error_not_a_loop(small):
    with pytest.raises(UserError, match=r"small \(train split\): contains no tokens"):
        small([[1, 2, 3]], 2, num_samples=5, indices=range(0))


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_documents_need_an_end_of_document_token(flag):
    with pytest.raises(UserError, match="end-of-document"):
        GPTDatasetConfig(1, 8, tokenizer=SimpleNamespace(vocab_size=9), **{flag: True})


def test_what_is_not_built_is_refused():
    with pytest.raises(UserError, match="object-storage"):
        GPTDatasetConfig(1, 8, object_storage_cache_path="s3://x")
    with pytest.raises(UserError, match="not yet"):
        GPTDatasetConfig(1, 8, hybrid_context_parallel=True)


@pytest.mark.parametrize("change", ["lengths", "tokens"])
def test_an_old_cache_never_serves_a_rewritten_file(small, change):
    # One document boundary or one token moves; names, sizes and settings stay.
    before = [[[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]]
    after = (
        [[[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]] if change == "lengths" else [[[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 12]]]
    )
    old = small(before, 3)
    new = small(after, 3)
    fresh = small(after, 3, path_to_cache="")
    assert old.unique_description_hash != new.unique_description_hash
    assert np.array_equal(new.sample_index, fresh.sample_index)
    if change == "lengths":
        assert not np.array_equal(old.sample_index, new.sample_index)


def test_the_cache_is_used_and_depends_on_all_that_matters(small, monkeypatch):
    documents = [[1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]
    first = small(documents, 3)
    builds = []
    monkeypatch.setattr(IndexCache, "save", lambda cache, arrays: builds.append(cache) or False)
    again = small(documents, 3)
    assert builds == []
    assert all(np.array_equal(getattr(first, name), getattr(again, name)) for name in INDICES)
    small(documents, 4)
    small(documents, 3, num_samples=9)
    small(documents, 3, add_extra_token_to_sequence=False)
    small(documents, 3, split=Split.valid)
    small(documents, 3, split=Split.valid, drop_last_partial_validation_sequence=False)
    small(documents, 3, indices=range(3))
    small(documents, 3, indices=[0, 2, 3])
    small(documents, 3, indices=[0, 1, 3])
    assert len(builds) == 8


def test_mapped_indices_travel_by_name(small):
    dataset = small([[1] * 9] * 400, 2, num_samples=400_000)
    assert isinstance(dataset.sample_index, np.memmap)
    sent = pickle.dumps(dataset)
    assert len(sent) < dataset.sample_index.nbytes // 4
    copy = pickle.loads(sent)
    assert all(np.array_equal(getattr(copy, name), getattr(dataset, name)) for name in INDICES)
    assert torch.equal(copy[77]["tokens"], dataset[77]["tokens"])
