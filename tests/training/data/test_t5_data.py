"""megatron/training/data/t5_data.py: from flags to batches."""

from pathlib import Path

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.t5_dataset import T5MaskedWordPieceDataset
from megatron.data.tokenizer.build import build_tokenizer
from megatron.training.arguments import configure
from megatron.training.data.loaders import build_data_iterator
from megatron.training.data.splits import collate_of
from megatron.training.data.t5_data import T5Batch, t5_dataset_config

CORPUS = Path(__file__).parents[2] / "data" / "golden" / "corpus"
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --encoder-seq-length 64 --decoder-seq-length 32 "
    "--max-position-embeddings 64 --micro-batch-size 2 --lr 1e-3 --train-iters 10 --split 80,10,10 "
    f"--tokenizer-type BertWordPieceLowerCase --vocab-file {CORPUS}/bert/vocab.txt "
    f"--data-path {CORPUS}/pp/bert_body_document"
)


def build(tmp_path, flags):
    words = f"{FLAGS} --data-cache-path {tmp_path} {flags}".split()
    config = configure(words, args_defaults={"model_family": "t5"})
    data = t5_dataset_config(config, build_tokenizer(config.tokenizer))
    return BlendedMegatronDatasetBuilder(T5MaskedWordPieceDataset, [60, 8, 0], lambda: True, data).build()[0]


def test_batches_have_the_items_fields(tmp_path):
    dataset = build(tmp_path, "--vocab-extra-ids 100 --mask-prob 0.2")
    with build_data_iterator(dataset, collate=collate_of(dataset), micro_batch_size=3, num_workers=1) as batches:
        batch = next(batches)
    items = [dataset[i] for i in range(3)]
    assert isinstance(batch, T5Batch) and batch.sample_ids.tolist() == [0, 1, 2]
    for name in ("text_enc", "text_dec", "labels", "loss_mask", "enc_mask", "dec_mask", "truncated"):
        assert (
            torch.equal(batch[name], torch.stack([item[name] for item in items])) and batch[name].dtype == torch.int64
        )
    assert batch.text_enc.shape == (3, 64) and batch.text_dec.shape == (3, 32)
    assert torch.equal(batch["enc_dec_mask"], batch.enc_mask)
    assert (dataset.config.masking_probability, dataset.config.sequence_length_encoder) == (0.2, 64)


def test_layout_and_workers_do_not_change_samples(tmp_path):
    dataset = build(tmp_path, "--vocab-extra-ids 100")

    def read(workers: int, rank: int, ranks: int) -> list[dict[str, list[int]]]:
        shard = {"micro_batch_size": 8 // ranks, "data_parallel_rank": rank, "data_parallel_size": ranks}
        with build_data_iterator(dataset, collate=collate_of(dataset), num_workers=workers, **shard) as batches:
            batch = next(batches)
        return [{name: value[row].tolist() for name, value in vars(batch).items()} for row in range(8 // ranks)]

    assert read(0, 0, 1) == read(2, 0, 1) == [*read(0, 0, 2), *read(1, 1, 2)]


def test_missing_sentinels_name_the_flag(tmp_path):
    with pytest.raises(UserError, match="--vocab-extra-ids: --tokenizer-type BertWordPieceLowerCase has 0 sentinels"):
        build(tmp_path, "")
