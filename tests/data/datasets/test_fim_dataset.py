"""megatron/data/datasets/fim_dataset.py: rearranged texts hold the same characters; choices follow the seed."""

from collections import Counter

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.data.datasets.gpt_dataset import GPTDataset
from megatron.data.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.data.datasets.utils import Split

MARKS = {"<fim_prefix>": 201, "<fim_middle>": 202, "<fim_suffix>": 203, "<cut>": 204}
EOD = 200


class Letters:
    """A letter is an id; two letters "ab" are one id too."""

    eod, pad, unique_identifiers = EOD, None, {"letters": 1}

    def tokenize(self, text):
        if text in MARKS:
            return [MARKS[text]]
        return [150 if pair else ord(one) for pair, one in self._pieces(text)]

    def _pieces(self, text):
        while text:
            pair = text.startswith("ab")
            yield pair, text[0]
            text = text[2 if pair else 1 :]

    def detokenize(self, ids):
        return "".join("ab" if index == 150 else chr(index) for index in ids)


TOKENIZER = Letters()
TEXTS = ["abcdefghij", "kk<cut>lmnop", "zabzab", "x", "qrstuvwxyzabab"] * 8


@pytest.fixture
def build(tmp_path):
    with IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16) as builder:
        for text in TEXTS:
            parts = text.split("<cut>")
            ids = [i for part in parts for i in [204, *TOKENIZER.tokenize(part)]][1:]
            builder.add_item(np.array([*ids, EOD], np.uint16))
            builder.end_document()
        builder.finalize(str(tmp_path / "a.idx"))

    def build_dataset(kind=GPTFIMDataset, seed=3, **fields):
        prefix = str(tmp_path / "a")
        config = GPTFIMDatasetConfig(
            seed, 32, blend=([prefix], None), split="1,0,0", tokenizer=TOKENIZER, path_to_cache=str(tmp_path), **fields
        )
        return kind(IndexedDataset(prefix), prefix, range(len(TEXTS)), None, Split.train, config)

    return build_dataset


def documents(ids):
    """The documents of a sample, without the last one, which may be cut."""
    found, current = [], []
    for index in ids.tolist():
        if index == EOD:
            found.append(current)
            current = []
        else:
            current.append(index)
    return [document for document in found if document]  # a sample may begin with the end of a document


def restored(document):
    """The text of a rearranged document and its order, or of one that was not."""
    if document[:1] != [201]:
        return TOKENIZER.detokenize([i for i in document if i != 204]), "plain"
    suffix, middle = document.index(203), document.index(202)
    before, after = document[1:suffix], document[suffix + 1 : middle]
    if (suffix == 1 and middle < len(document) - 1) or before == []:
        # suffix first (or an empty prefix): prefix and middle follow together
        return TOKENIZER.detokenize(document[middle + 1 :]) + TOKENIZER.detokenize(after), "suffix first"
    return TOKENIZER.detokenize(before) + TOKENIZER.detokenize(document[middle + 1 :]) + TOKENIZER.detokenize(
        after
    ), "prefix first"


def test_documents_hold_their_text_in_another_order(build):
    plain, dataset = build(GPTDataset), build(fim_rate=0.7)
    assert len(dataset) == len(plain)
    orders = Counter()
    for i in range(len(dataset)):
        before, after = plain.read_sample(i), dataset.read_sample(i)
        assert len(after) <= len(before) and after.dtype == before.dtype
        texts = [TOKENIZER.detokenize([k for k in document if k != 204]) for document in documents(before)]
        for text, document in zip(texts, documents(after), strict=False):
            found, order = restored([k for k in document if k != 204])
            assert found == text
            orders[order] += 1
    assert min(orders.values()) >= 3 and set(orders) == {"plain", "prefix first", "suffix first"}


def test_nothing_is_rearranged_at_rate_0_and_all_at_1(build):
    plain = build(GPTDataset)
    assert all(np.array_equal(build(fim_rate=0.0).read_sample(i), plain.read_sample(i)) for i in range(len(plain)))
    first = build(fim_rate=1.0, fim_spm_rate=0.0)
    for i in range(len(first)):
        for document in documents(first.read_sample(i)):
            assert document[0] == 201


def test_choices_follow_seed_and_sample(build):
    one, again, other = build(), build(), build(seed=4)
    order = list(range(len(one)))
    samples = {i: one.read_sample(i) for i in order}
    assert all(np.array_equal(again.read_sample(i), samples[i]) for i in reversed(order))
    assert any(not np.array_equal(other.read_sample(i), samples[i]) for i in order)
    item = one[0]
    assert item["tokens"].shape == (32,) and item["loss_mask"].sum() <= 32


def test_fragments_and_those_that_are_left_alone(build):
    dataset = build(fim_rate=1.0, fim_split_sample="<cut>", fim_fragment_rate=1.0, fim_no_prefix="kk")
    divided = [
        document
        for i in range(len(dataset))
        for document in documents(dataset.read_sample(i))
        if 204 in document and document[:2] == [ord("k")] * 2
    ]
    assert divided and all(document[2:4] == [204, 201] for document in divided)


@pytest.mark.parametrize("flag", ["--fim-prefix-token", "--fim-middle-token", "--fim-suffix-token", "--fim-eod-token"])
def test_a_mark_must_be_one_token(build, flag):
    with pytest.raises(UserError, match=f"{flag} <mid>: must be one token of the tokenizer, which has 5 for it"):
        build(**{flag[2:].replace("-", "_"): "<mid>"})
    assert len(build(**{flag[2:].replace("-", "_"): "<cut>"}).read_sample(0)) > 0


def test_marks_by_their_role():
    """Megatron-LM's entry script gives the marks as a dictionary."""
    marks = {"prefix": "<p>", "middle": "<m>", "suffix": "<s>", "pad": "<pad>", "eod": None}
    config = GPTFIMDatasetConfig(1, 8, mock=True, tokenizer=TOKENIZER, fim_extra_tokens=marks)
    found = (config.fim_prefix_token, config.fim_middle_token, config.fim_suffix_token, config.fim_eod_token)
    assert found == ("<p>", "<m>", "<s>", None)
