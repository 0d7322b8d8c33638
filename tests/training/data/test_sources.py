"""Where a run's data is, for all kinds of data sets."""

from pathlib import Path

import numpy as np
import pytest
from support.command_lines import configured, problems_of, without

from megatron.data.datasets.fim_dataset import GPTFIMDatasetConfig
from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data.tokenizer.null import NullTokenizer
from megatron.training.data.sources import blends, gpt_dataset_config, gpt_dataset_kind, shared_fields

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


@pytest.mark.parametrize("field", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_each_flag_about_documents_reaches_its_field(field: str) -> None:
    tokenizer = NullTokenizer(100)
    made = gpt_dataset_config(configured(f"--{field.replace('_', '-')}"), tokenizer)
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    assert {name: getattr(made, name) for name in names} == {name: name == field for name in names}


def test_the_shared_fields_are_there_and_masks_are_not_made() -> None:
    tokenizer = NullTokenizer(100)
    made = gpt_dataset_config(configured("--seed 9"), tokenizer)
    assert made.mock and made.random_seed == 9 and made.sequence_length == 128 and made.tokenizer is tokenizer
    assert not made.create_attention_mask and made.mmap_bin_files
    assert not gpt_dataset_config(configured("--no-mmap-bin-files"), tokenizer).mmap_bin_files


def test_kinds_of_data_sets() -> None:
    def kind(flags: str, base: str = without("--mock-data")) -> str:
        return gpt_dataset_kind(configured(f"--data-path x {flags}", base=base)).__name__

    assert kind("") == "GPTDataset" and kind("--fim-data") == "GPTFIMDataset"
    sft = without("--mock-data").replace("NullTokenizer", "SFTTokenizer --tokenizer-model x")
    assert kind("--sft", sft) == "SFTDataset"
    for flags in ("", "--sft", "--fim-data"):
        config = configured(flags)
        assert gpt_dataset_kind(config).__name__ == "MockGPTDataset"
        assert bool(flags) == any(note.startswith(f"{flags}: has no effect with --mock-data") for note in config.notes)


def test_the_fields_of_fill_in_the_middle() -> None:
    made = gpt_dataset_config(configured("--fim-data --fim-rate 0.25 --fim-no-prefix x"), NullTokenizer(100))
    assert isinstance(made, GPTFIMDatasetConfig)
    assert (made.fim_rate, made.fim_spm_rate, made.fim_no_prefix) == (0.25, 0.5, "x")
    assert problems_of("--fim-data --fim-rate 2")[0].startswith("--fim-rate 2.0: expected a fraction from 0 to 1")
    assert problems_of("--fim-data --sft") == [
        "--fim-data rearranges plain text and --sft reads conversations; give one"
    ]
