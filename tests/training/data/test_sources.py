"""Where a run's data is, for all kinds of data sets."""

from pathlib import Path

import numpy as np
from support.command_lines import configured

from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data.tokenizer.null import NullTokenizer
from megatron.training.data.sources import blends, shared_fields

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --tokenizer-type NullTokenizer --vocab-size 100"
)
TOKENIZER = NullTokenizer(100)


def write(prefix: Path, *ids: int) -> str:
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        builder.add_document(np.array(ids), [len(ids)])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_mock_data_has_no_blend() -> None:
    config = configured("--mock-data", base=BASE)
    assert blends(config) == (None, None)
    made = shared_fields(config, TOKENIZER)
    assert made["mock"] and made["blend"] is None and made["blend_per_split"] is None
    assert made["sequence_length"] == 128 and made["tokenizer"] is TOKENIZER


def test_flags_reach_the_fields(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 1, 2, 100)
    flags = f"--data-path {prefix} --split 8,1,1 --seed 7 --data-cache-path {tmp_path}"
    made = shared_fields(configured(flags, base=BASE), TOKENIZER)
    assert made["blend"] == ([prefix], None) and made["blend_per_split"] is None
    assert (made["split"], made["random_seed"], made["path_to_cache"]) == ("8,1,1", 7, str(tmp_path))


def test_data_of_each_split_replaces_the_split(tmp_path: Path) -> None:
    train, valid = write(tmp_path / "train", 1, 100), write(tmp_path / "valid", 2, 100)
    config = configured(f"--train-data-path {train} --valid-data-path {valid}", base=BASE)
    made = shared_fields(config, TOKENIZER)
    assert made["blend"] is None and made["split"] is None
    assert made["blend_per_split"] == [([train], None), ([valid], None), None]
