"""Made-up documents for BERT and T5."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.masked_data import MASKING

from megatron.core.exceptions import UserError
from megatron.data.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.mock_sentences import MockSentences
from megatron.data.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

SPECIAL = {"pad": 0, "cls": 1, "sep": 2, "mask": 3, "bos": 4, "eos": 5, "additional_special_tokens_ids": [6, 7, 8, 9]}
TOKENIZER = SimpleNamespace(inv_vocab={number: f"t{number}" for number in range(30)}, **SPECIAL)


def test_sentences_count_up_through_the_ordinary_tokens() -> None:
    made, again = MockSentences(TOKENIZER), MockSentences(TOKENIZER)
    assert len(made.document_indices) == made.num_documents + 1 and made.document_indices[-1] == len(made)
    assert np.diff(made.document_indices).min() >= 2
    for number in (0, 1, len(made) - 1):
        sentence = made.get(number)
        assert len(sentence) == made.sequence_lengths[number] >= 2
        assert set(sentence) <= set(range(10, 30)) and set(np.diff(sentence)) <= {1, -19}
        assert np.array_equal(sentence, again.get(number))
    other = SimpleNamespace(**{**vars(TOKENIZER), "mask": 10})
    assert made.content_digest(with_documents=True) == again.content_digest() != MockSentences(other).content_digest()


def test_a_vocabulary_of_special_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="special tokens only"):
        MockSentences(SimpleNamespace(inv_vocab=dict.fromkeys(range(10), "x"), **SPECIAL))


@pytest.mark.parametrize(
    ("kind", "config_class", "own"),
    [
        (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, {"classification_head": True}),
        (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig, {"sequence_length_decoder": 16}),
    ],
)
def test_each_split_has_samples(kind, config_class, own) -> None:
    config = config_class(random_seed=1, sequence_length=24, mock=True, tokenizer=TOKENIZER, **MASKING, **own)
    datasets = BlendedMegatronDatasetBuilder(kind, [20, 5, 5], lambda: True, config).build()
    assert [len(dataset) >= count for dataset, count in zip(datasets, (20, 5, 5), strict=True)] == [True] * 3
    assert all(dataset[0]["loss_mask"].sum() >= 1 for dataset in datasets)
