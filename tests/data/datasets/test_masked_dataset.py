"""megatron/data/datasets/masked_dataset.py: golden samples of BERT and T5, the index cache, and bad data."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.masked_data import MASKING, build_masked

from megatron.core.exceptions import UserError
from megatron.core.utils import warn
from megatron.data.datasets import index_cache, masked_dataset
from megatron.data.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

BERT = (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, {"classification_head": True})
T5 = (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig, {"sequence_length_decoder": 32})


@pytest.fixture(scope="module")
def wordpiece(golden):
    """The golden WordPiece vocabulary, with the special ids that Megatron-LM's tokenizer has."""
    tokens = (golden / "corpus" / "bert" / "vocab.txt").read_text().splitlines()
    tokens += ["[BOS]", "[EOS]", *(f"<extra_id_{i}>" for i in range(100))]
    ids = {token.strip("[]").lower(): number for number, token in enumerate(tokens)}
    special = {name: ids[name] for name in ("cls", "sep", "mask", "pad", "bos", "eos")}
    extra = [number for number, token in enumerate(tokens) if token.startswith("<extra_id_")]
    return SimpleNamespace(inv_vocab=dict(enumerate(tokens)), additional_special_tokens_ids=extra, **special)


@pytest.fixture
def build(tmp_path, wordpiece):
    """Builds one dataset of a prefix."""

    def build(kind, prefix, samples, **changes):
        cls, config_class, own = kind
        fields = {"random_seed": 1234, "sequence_length": 32, "tokenizer": wordpiece}
        return build_masked(cls, config_class, prefix, samples, **fields | MASKING | own | changes)

    return build


CASES = json.loads((Path(__file__).parents[2] / "data" / "golden" / "bert_t5" / "info.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_samples_are_megatron_lms(case, golden, wordpiece, tmp_path):
    cls, config_class, _ = BERT if case["cls"] == "BERTMaskedWordPieceDataset" else T5
    blend = ([str(golden / "corpus" / "pp" / "bert_body_document")], None)
    vocab = {i: token for i, token in wordpiece.inv_vocab.items() if i < case["tokenizer"]["vocab_size"]}
    tokenizer = SimpleNamespace(**{**vars(wordpiece), "inv_vocab": vocab})
    config = config_class(
        **case["config"], blend=blend, split=case["split"], tokenizer=tokenizer, path_to_cache=str(tmp_path)
    )
    arrays = np.load(golden / "bert_t5" / "samples.npz")
    datasets = BlendedMegatronDatasetBuilder(cls, case["sizes"], lambda: True, config).build()
    for dataset, (split, expected) in zip(datasets, case["splits"].items(), strict=True):
        assert len(dataset) == expected["len"]
        assert np.array_equal(dataset.sample_index, arrays[f"{case['name']}_{split}_sample_index"])
        assert dataset.sample_index.dtype == expected["sample_index"]["dtype"]
        for key in expected["keys"]:
            golden_items = arrays[f"{case['name']}_{split}_{key}"]
            items = np.stack([dataset[i][key].numpy() for i in range(len(golden_items))])
            assert items.dtype == np.int64 and np.array_equal(items, golden_items), (split, key)


@pytest.mark.parametrize("kind", [BERT, T5], ids=["bert", "t5"])
def test_an_index_is_loaded_from_the_cache(kind, build, golden, tmp_path, monkeypatch, caplog):
    prefix = golden / "corpus" / "pp" / "bert_body_document"
    first = build(kind, prefix, 50, path_to_cache=str(tmp_path))
    monkeypatch.setattr(masked_dataset, "build_sample_map", None)  # a call would fail
    warn._warn_once.cache_clear()
    before = caplog.text
    caplog.clear()
    again = build(kind, prefix, 50, path_to_cache=str(tmp_path))
    assert np.array_equal(first.sample_index, again.sample_index)
    assert caplog.text == before and "cut off" in before
    with pytest.raises(TypeError):
        build(kind, prefix, 51, path_to_cache=str(tmp_path))


def test_an_index_of_other_settings_or_documents_is_not_taken(build, write_documents, tmp_path):
    def key(kind=BERT, samples=50, documents=([[5] * 9] * 6, [[6] * 9] * 6), **changes):
        return build(kind, write_documents(tmp_path / "data", documents), samples, **changes).unique_description_hash

    moved = ([[5] * 9] * 6 + [[6] * 9], [[6] * 9] * 5)  # the same sentences, divided elsewhere
    others = [
        *(key(sequence_length=31), key(random_seed=1), key(short_sequence_probability=0.2), key(samples=51)),
        *(key(classification_head=False), key(T5), key(split="9,1"), key(documents=moved)),
    ]
    assert len({key(), *others}) == 9
    assert key(masking_probability=0.3) == key()  # drawn per item


def test_a_copy_in_another_process_maps_the_index_again(build, write_documents, tmp_path, monkeypatch):
    monkeypatch.setattr(index_cache, "_IN_MEMORY_BELOW", 100)
    prefix = write_documents(tmp_path / "data", [[[1, 2, 3]] * 40] * 20)
    dataset = build(BERT, prefix, 100)
    assert isinstance(dataset.sample_index, np.memmap)
    dataset.folder = tmp_path  # an attribute of a subclass; only mapped arrays are opened
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.folder == tmp_path
    assert isinstance(copy.sample_index, np.memmap) and len(pickle.dumps(dataset)) < 50_000
    assert all((copy[7][key] == value).all() for key, value in dataset[7].items())


@pytest.mark.parametrize(("kind", "length"), [(BERT, 23), (T5, 22)])
def test_samples_too_short_for_a_masked_token(kind, length, build, write_documents, tmp_path):
    prefix = write_documents(tmp_path / "data", [[[5, 6, 7], [8, 9]]] * 3)
    assert len(build(kind, prefix, 2, masking_probability=0.05, sequence_length=length))
    with pytest.raises(UserError, match=rf"--mask-prob 0.05: .* of the 19 tokens .* or --seq-length {length}$"):
        build(kind, prefix, 2, masking_probability=0.05, sequence_length=length - 1)


LONG = [[9] * 600, [9, 9], [9, 9]]
UNUSABLE = [
    (BERT, [[[5, 6, 7]]] * 3, "each document is one sequence: the text was not divided into sentences"),
    (BERT, [[[5, 6, 7]]] * 3, "--bert-no-binary-head trains without them"),
    (BERT, [[[5, 6, 7]], []], "each document is one sequence"),
    (BERT, [LONG, LONG], "none of its 2 documents is usable: 0 have fewer than 2 sentences, 2 a sentence of more than"),
    (T5, [LONG, [[9] * 3, [9] * 513]], "none of its 2 documents is usable"),
    (T5, [[[9] * 600], [[9] * 4]], "(the longest has 600 tokens; a sample uses at most 30 of them)"),
]


@pytest.mark.parametrize(("kind", "documents", "sentence"), UNUSABLE)
def test_data_without_usable_documents_is_refused(kind, documents, sentence, build, write_documents, tmp_path):
    prefix = write_documents(tmp_path / "data", documents)
    with pytest.raises(UserError) as error:
        build(kind, prefix, 10)
    assert sentence in str(error.value) and str(error.value).startswith(f"--data-path {prefix} (train split): ")


def test_short_documents_of_one_sentence_are_samples_without_pairs(build, write_documents, tmp_path):
    prefix = write_documents(tmp_path / "data", [[[5, 6, 7]], [[8, 9]]])
    assert len(build(BERT, prefix, None, classification_head=False)) == len(build(T5, prefix, None)) == 2


def test_what_is_left_out_is_counted(build, write_documents, tmp_path, caplog):
    prefix = write_documents(tmp_path / "data", [LONG, [[5, 6]], [], [[7] * 20, [8] * 20]])
    build(BERT, prefix, 5, short_sequence_probability=0.0)
    said = caplog.text
    assert "1 documents with fewer than 2 sentences are not used" in said
    assert "1 documents with a sentence of more than 512 tokens are not used" in said
    assert "27.5% of the tokens are cut off" in said  # 11 of 40
    assert "5 samples are requested, which are made in 5 epochs over its documents" in said


WRONG = [
    (BERT, {"masking_probability": None}, "masking_probability: a value is required"),
    (BERT, {"classification_head": None}, "classification_head: a value is required"),
    (T5, {"sequence_length_decoder": None}, "sequence_length_decoder: a value is required"),
    (BERT, {"masking_probability": 1.5}, "--mask-prob 1.5: expected a fraction between 0 and 1"),
    (BERT, {"short_sequence_probability": -0.1}, "--short-seq-prob -0.1: expected a fraction from 0 to 1"),
    (BERT, {"masking_do_permutation": True}, "masking_do_permutation: not yet"),
    (BERT, {"masking_max_ngram": 0}, "masking_max_ngram 0: expected 1 or more"),
    (BERT, {"masking_use_longer_ngrams": True, "masking_use_geometric_distribution": True}, "give one of them"),
    (BERT, {"sequence_length": 4}, "--seq-length 4: BERT's samples have three special tokens and at least two"),
    (T5, {"sequence_length": 3}, "--encoder-seq-length 3: a sample of T5 has at least two tokens; give 4 or more"),
    (T5, {"sequence_length": 512, "sequence_length_decoder": 80}, "153 are always enough"),
]


@pytest.mark.parametrize(("kind", "changes", "sentence"), WRONG)
def test_impossible_values_are_refused(kind, changes, sentence, build):
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        build(kind, "unread", 10, **changes)


WITHOUT = [
    (BERT, {"mask": None}, r"has no token \[MASK\], which BERT needs"),
    (BERT, {"cls": -1, "pad": None}, r"has no token \[CLS\], \[PAD\], which BERT needs"),
    (T5, {"bos": None}, r"has no token \[BOS\], which T5 needs.*padding token, which \"bos_token\": \"<pad>\" in"),
    (T5, {"additional_special_tokens_ids": []}, "has 0 sentinels <extra_id_i>; T5 needs one for each masked span"),
]


@pytest.mark.parametrize(("kind", "changes", "sentence"), WITHOUT)
def test_a_vocabulary_without_special_tokens_is_refused(kind, changes, sentence, build, wordpiece):
    with pytest.raises(UserError, match=sentence):
        build(kind, "unread", 10, tokenizer=SimpleNamespace(**{**vars(wordpiece), **changes}))


def test_a_tokenizer_that_cannot_list_its_tokens_is_refused(build, wordpiece):
    few = {name: value for name, value in vars(wordpiece).items() if name != "inv_vocab"}
    with pytest.raises(UserError, match="SimpleNamespace: cannot list its tokens"):
        build(BERT, "unread", 10, tokenizer=SimpleNamespace(**few))
