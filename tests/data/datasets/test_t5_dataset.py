"""megatron/data/datasets/t5_dataset.py: what an item contains; test_masked_dataset.py compares golden items."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.masked_data import build_masked, pieces, random_documents

from megatron.core.exceptions import UserError
from megatron.data.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

PAD, BOS, EOS, SENTINELS = 90, 91, 92, [100, 99, 98, 97, 96, 95, 94]


@pytest.fixture
def build(write_documents, tmp_path):
    def build(samples=200, **changes):
        extra = changes.pop("extra", SENTINELS)
        tokenizer = SimpleNamespace(
            pad=PAD, bos=BOS, eos=EOS, additional_special_tokens_ids=extra, inv_vocab=pieces(101)
        )
        fields = {"masking_max_ngram": 4, "masking_use_geometric_distribution": True, "sequence_length_decoder": 15}
        fields |= {"tokenizer": tokenizer, **changes}
        prefix = write_documents(tmp_path / "data", random_documents())
        return build_masked(T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig, prefix, samples, **fields)

    return build


def test_the_decoder_fills_the_encoders_sentinels(build):
    dataset = build()
    spans = 0
    for i in range(len(dataset)):
        item = dataset[i]
        sentences, target = dataset.read_sentences(i)
        whole = np.concatenate(sentences).tolist()
        encoder = item["text_enc"][item["enc_mask"] == 1].tolist()
        decoder = item["text_dec"][item["dec_mask"] == 1].tolist()
        labels = item["labels"][item["loss_mask"] == 1].tolist()
        assert decoder[0] == BOS and labels == [*decoder[1:], EOS]
        filled = {}
        for token in decoder[1:]:
            if token in SENTINELS:
                filled[token] = []
            else:
                filled[next(reversed(filled))].append(token)
        assert list(filled) == SENTINELS[: len(filled)] == [token for token in encoder if token in SENTINELS]
        text = [token for place in encoder for token in filled.get(place, [place])]
        assert text == whole[:target] and item["truncated"] == (len(whole) > target)
        assert set(item["labels"][item["loss_mask"] == 0].tolist()) <= {-1}
        assert {*item["text_enc"][len(encoder) :].tolist(), *item["text_dec"][len(decoder) :].tolist()} <= {PAD}
        spans += len(filled)
    assert spans > len(dataset)


def test_a_row_that_fills_up_a_batch_has_no_loss(build):
    item = build()[None]
    assert item["sample_id"] == -1 and not item["loss_mask"].any() and item["dec_mask"].any()


def test_few_sentinels_are_told_at_the_start(build, caplog):
    build(extra=SENTINELS[:6])
    assert "the tokenizer has" not in caplog.text  # six masked tokens at most
    build(extra=SENTINELS[:5])
    assert "the tokenizer has 5 sentinels <extra_id_i>" in caplog.text and "6 are always enough" in caplog.text


def test_samples_that_do_not_fit_name_the_flag(build):
    short = build(sequence_length_decoder=9)  # six masked tokens in two spans fit
    with pytest.raises(
        UserError, match=r"--decoder-seq-length 9: sample \d+ .* needs 1\d tokens; 13 are always enough"
    ):
        _ = [short[i] for i in range(len(short))]
    few = build(extra=SENTINELS[:2])
    with pytest.raises(UserError, match=r"--vocab-extra-ids: sample \d+ .* has 3 masked spans, .* 2 sentinels; 6 are"):
        _ = [few[i] for i in range(len(few))]


def test_attention_masks():
    padding = torch.tensor([[False, False, False, True]]), torch.tensor([[False, False, True]])
    encoder, decoder, cross = T5MaskedWordPieceDataset.config_attention_mask(*padding, *padding, use_local=True)
    assert encoder.tolist() == [[[[False, False, False, True]] * 4]]
    assert decoder.tolist() == [[[[False, True, True], [False, False, True], [False, False, True]]]]
    assert cross.tolist() == [[[[False, False, False, True]] * 3]]
    encoder, decoder, cross = T5MaskedWordPieceDataset.config_attention_mask(*padding, *padding)
    assert encoder.shape == cross[1].shape == (1, 1, 1, 4) and decoder is None and cross[0].shape == (1, 1, 1, 3)
