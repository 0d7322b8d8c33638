"""megatron/data/datasets/bert_dataset.py: what an item contains; test_masked_dataset.py compares golden items."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.masked_data import build_masked, pieces, random_documents

from megatron.data.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, _truncate

CLS, SEP, MASK, PAD = 90, 91, 92, 93
S = 24


@pytest.fixture
def build(write_documents, tmp_path):
    def build(head=True, samples=200):
        tokenizer = SimpleNamespace(cls=CLS, sep=SEP, mask=MASK, pad=PAD, inv_vocab=pieces(94))
        fields = {"tokenizer": tokenizer, "masking_max_ngram": 2, "classification_head": head}
        prefix = write_documents(tmp_path / "data", random_documents())
        return build_masked(
            BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, prefix, samples, sequence_length=S, **fields
        )

    return build


def original(item):
    """The tokens before masking, without padding."""
    labels, text = item["labels"], item["text"]
    return torch.where(labels >= 0, labels, text)[item["padding_mask"] == 1].tolist()


@pytest.mark.parametrize("head", [True, False])
def test_an_item_is_its_sentences(build, head):
    dataset = build(head)
    replaced = {"mask": 0, "same": 0, "random": 0}
    swapped = 0
    for i in range(len(dataset)):
        item = dataset[i]
        sentences, target = dataset.read_sentences(i)
        whole = np.concatenate(sentences).tolist()
        tokens = original(item)
        segments = " ".join(map(str, tokens)).split(f" {SEP}")
        assert tokens[0] == CLS and tokens[-1] == SEP and len(segments) == 3 - (not head)
        first = [int(word) for word in segments[0].split()[1:]]
        second = [int(word) for word in segments[1].split()]
        assert item["truncated"] == (len(whole) > target) and len(first) + len(second) == min(len(whole), target)
        if not item["truncated"]:
            assert whole == (second + first if item["is_random"] else first + second)
        swapped += int(item["is_random"])
        types = item["types"].tolist()
        assert types == [0] * (len(first) + 2) + [1] * (len(tokens) - len(first) - 2) + [0] * (S - len(tokens))
        masked = item["labels"] >= 0
        assert torch.equal(masked.long(), item["loss_mask"]) and torch.all(item["text"][len(tokens) :] == PAD)
        for new, old in zip(item["text"][masked].tolist(), item["labels"][masked].tolist(), strict=True):
            replaced["mask" if new == MASK else "same" if new == old else "random"] += 1
    total = sum(replaced.values())
    assert 0.75 < replaced["mask"] / total < 0.85 and all(0.06 < replaced[k] / total < 0.14 for k in ("same", "random"))
    assert (0.4 < swapped / len(dataset) < 0.6) == head and (swapped == 0) != head


def test_items_do_not_depend_on_what_was_read_before(build):
    dataset = build()
    alone = dataset[11]
    _ = [dataset[i] for i in (3, 11, 4)]
    assert all(torch.equal(dataset[11][key], value) for key, value in alone.items())
    assert {value.dtype for value in alone.values()} == {torch.int64}
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_row_that_fills_up_a_batch_has_no_loss(build):
    dataset = build()
    item, first = dataset[None], dataset[0]
    assert item["sample_id"] == item["is_random"] == -1 and not item["loss_mask"].any()
    assert torch.equal(item["text"], first["text"]) and first["sample_id"] == 0


def test_tokens_are_cut_from_the_longer_segment():
    random = np.random.RandomState(0)
    for first, second, target in ((10, 4, 8), (4, 10, 8), (5, 5, 7), (9, 0, 4), (2, 2, 9)):
        a, b = _truncate(first, second, target, random)
        sizes = a.stop - a.start, b.stop - b.start
        assert sum(sizes) == min(first + second, target) and a.start >= 0 and b.stop <= second
        if first + second > target and second:
            assert abs(sizes[0] - sizes[1]) <= 1 or min(sizes) == min(first, second)
