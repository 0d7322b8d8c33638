"""megatron/training/data/bert_data.py: from flags to batches."""

import itertools
from pathlib import Path

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.data.datasets.bert_dataset import BERTMaskedWordPieceDataset
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.tokenizer.build import build_tokenizer
from megatron.training.arguments import configure
from megatron.training.data.bert_data import BertBatch, bert_dataset_config, collate_bert
from megatron.training.data.loaders import build_data_iterator
from megatron.training.data.splits import collate_of

CORPUS = Path(__file__).parents[2] / "data" / "golden" / "corpus"
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-3 "
    f"--train-iters 10 --tokenizer-type BertWordPieceLowerCase --vocab-file {CORPUS}/bert/vocab.txt --split 80,10,10 "
    f"--data-path 0.3 {CORPUS}/pp/bert_body_document 0.7 {CORPUS}/pp/bert_body_document"
)


@pytest.fixture
def build(tmp_path):
    def build(flags="", samples=60):
        words = f"{FLAGS} --data-cache-path {tmp_path} {flags}".split()
        config = configure(words, args_defaults={"model_family": "bert"})
        data = bert_dataset_config(config, build_tokenizer(config.tokenizer))
        return BlendedMegatronDatasetBuilder(BERTMaskedWordPieceDataset, [samples, 8, 0], lambda: True, data).build()[0]

    return build


def read(dataset, count, **arguments):
    iterator = build_data_iterator(dataset, collate=collate_of(dataset), **arguments)
    with iterator:
        return list(itertools.islice(iterator, count))


def test_batches_have_the_items_fields(build):
    dataset = build()
    assert collate_of(dataset) is collate_bert
    batch = read(dataset, 1, micro_batch_size=3, num_workers=0)[0]
    items = [dataset[i] for i in range(3)]
    assert isinstance(batch, BertBatch) and batch.sample_ids.tolist() == [0, 1, 2]
    for name in ("text", "types", "labels", "is_random", "loss_mask", "padding_mask", "truncated"):
        assert (
            torch.equal(batch[name], torch.stack([item[name] for item in items])) and batch[name].dtype == torch.int64
        )
    assert batch.text.shape == (3, 32) and batch.is_random.shape == (3,)
    moved = batch.to("meta")
    assert moved.text.device.type == "meta" and moved.sample_ids.device.type == "cpu"


def test_layout_workers_and_resuming_do_not_change_samples(build):
    dataset = build()
    whole = {
        int(number): row.tolist()
        for batch in read(dataset, 10, micro_batch_size=4, num_workers=0)
        for number, row in zip(batch.sample_ids, batch.text, strict=True)
    }
    for ranks, workers, consumed in ((1, 2, 0), (2, 0, 8), (4, 1, 16)):
        for rank in range(ranks):
            shard = {"data_parallel_rank": rank, "data_parallel_size": ranks, "consumed_samples": consumed}
            for batch in read(dataset, 2, micro_batch_size=2, num_workers=workers, **shard):
                for number, row in zip(batch.sample_ids.tolist(), batch.text.tolist(), strict=True):
                    assert number >= consumed and row == whole[number]


def test_flags_become_the_config(build):
    config = build("--mask-prob 0.2 --short-seq-prob 0 --bert-no-binary-head --seed 7").config
    assert (config.masking_probability, config.short_sequence_probability, config.random_seed) == (0.2, 0.0, 7)
    assert config.classification_head is False and config.min_sentences == 1
    usual = build().config
    assert (usual.masking_probability, usual.short_sequence_probability, usual.classification_head) == (0.15, 0.1, True)


def test_a_tokenizer_without_mask_is_refused(build):
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {CORPUS}/hf --vocab-size 600"
    with pytest.raises(UserError, match=r"HuggingFaceTokenizer: has no token \[MASK\], \[PAD\], which BERT"):
        build(flags)
