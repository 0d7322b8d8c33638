"""megatron/training/data/masked_data.py: from flags to batches of BERT and T5."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.data.datasets.bert_dataset import BERTMaskedWordPieceDataset
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.t5_dataset import T5MaskedWordPieceDataset
from megatron.data.tokenizer.build import build_tokenizer
from megatron.training.arguments import configure
from megatron.training.data.loaders import build_data_iterator
from megatron.training.data.masked_data import BertBatch, T5Batch, bert_dataset_config, t5_dataset_config
from megatron.training.data.splits import collate_of

CORPUS = Path(__file__).parents[2] / "data" / "golden" / "corpus"
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --lr 1e-3 --train-iters 10 "
    f"--split 80,10,10 --tokenizer-type BertWordPieceLowerCase --vocab-file {CORPUS}/bert/vocab.txt "
)
OF_BERT = f"--seq-length 32 --data-path 0.3 {CORPUS}/pp/bert_body_document 0.7 {CORPUS}/pp/bert_body_document"
OF_T5 = "--encoder-seq-length 64 --decoder-seq-length 32 --max-position-embeddings 64 "
OF_T5 += f"--data-path {CORPUS}/pp/bert_body_document"
SENTINELS = "--vocab-extra-ids 100"

Build = Callable[[str, str], Any]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def build(family: str, flags: str) -> Any:
        words = f"{FLAGS} {OF_BERT if family == 'bert' else OF_T5} --data-cache-path {tmp_path} {flags}".split()
        config = configure(words, args_defaults={"model_family": family})
        kind = BERTMaskedWordPieceDataset if family == "bert" else T5MaskedWordPieceDataset
        data = (bert_dataset_config if family == "bert" else t5_dataset_config)(
            config, build_tokenizer(config.tokenizer)
        )
        return BlendedMegatronDatasetBuilder(kind, [60, 8, 0], lambda: True, data).build()[0]

    return build


def read(dataset: Any, count: int, **arguments: Any) -> list[Any]:
    iterator: Any = build_data_iterator(dataset, collate=collate_of(dataset), **arguments)
    with iterator:
        return list(itertools.islice(iterator, count))


@pytest.mark.parametrize(
    ("family", "kind", "names", "shapes"),
    [
        (
            "bert",
            BertBatch,
            ("text", "types", "labels", "is_random", "loss_mask", "padding_mask", "truncated"),
            {"text": (3, 32), "is_random": (3,)},
        ),
        (
            "t5",
            T5Batch,
            ("text_enc", "text_dec", "labels", "loss_mask", "enc_mask", "dec_mask", "truncated"),
            {"text_enc": (3, 64), "text_dec": (3, 32)},
        ),
    ],
)
def test_batches_have_the_items_fields(
    build: Build, family: str, kind: Any, names: tuple[str, ...], shapes: dict[str, tuple[int, ...]]
) -> None:
    dataset = build(family, SENTINELS if family == "t5" else "")
    batch = read(dataset, 1, micro_batch_size=3, num_workers=0)[0]
    items = [dataset[i] for i in range(3)]
    assert isinstance(batch, kind) and batch.sample_ids.tolist() == [0, 1, 2]
    for name in names:
        stacked = torch.stack([item[name] for item in items])
        assert torch.equal(batch[name], stacked) and batch[name].dtype == torch.int64
    assert {name: batch[name].shape for name in shapes} == shapes
    assert family == "bert" or torch.equal(batch["enc_dec_mask"], batch.enc_mask)
    moved = batch.to("meta")
    assert moved.labels.device.type == "meta" and moved.sample_ids.device.type == "cpu"


@pytest.mark.parametrize(("family", "flags", "text"), [("bert", "", "text"), ("t5", SENTINELS, "text_dec")])
def test_layout_workers_and_resuming_do_not_change_samples(build: Build, family: str, flags: str, text: str) -> None:
    dataset = build(family, flags)
    whole = {
        int(number): row.tolist()
        for batch in read(dataset, 10, micro_batch_size=4, num_workers=0)
        for number, row in zip(batch.sample_ids, batch[text], strict=True)
    }
    for ranks, workers, consumed in ((1, 2, 0), (2, 0, 8), (4, 1, 16)):
        for rank in range(ranks):
            shard = {"data_parallel_rank": rank, "data_parallel_size": ranks, "consumed_samples": consumed}
            for batch in read(dataset, 2, micro_batch_size=2, num_workers=workers, **shard):
                for number, row in zip(batch.sample_ids.tolist(), batch[text].tolist(), strict=True):
                    assert number >= consumed and row == whole[number]


def test_flags_become_the_config(build: Build) -> None:
    config = build("bert", "--mask-prob 0.2 --short-seq-prob 0 --bert-no-binary-head --seed 7").config
    assert (config.masking_probability, config.short_sequence_probability, config.random_seed) == (0.2, 0.0, 7)
    assert config.classification_head is False and config.min_sentences == 1
    usual = build("bert", "").config
    assert (usual.masking_probability, usual.short_sequence_probability, usual.classification_head) == (0.15, 0.1, True)
    config = build("t5", f"{SENTINELS} --mask-prob 0.2").config
    assert (config.masking_probability, config.sequence_length_encoder) == (0.2, 64)


@pytest.mark.parametrize(
    ("family", "flags", "problem"),
    [
        (
            "bert",
            f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {CORPUS}/hf --vocab-size 600",
            r"HuggingFaceTokenizer: has no token \[MASK\], \[PAD\], which BERT",
        ),
        ("t5", "", "--vocab-extra-ids: --tokenizer-type BertWordPieceLowerCase has 0 sentinels"),
    ],
)
def test_a_tokenizer_without_special_tokens_is_refused(build: Build, family: str, flags: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        build(family, flags)
