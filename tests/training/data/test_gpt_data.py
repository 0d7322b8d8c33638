"""The config of a GPT run's data sets, from its flags."""

import pytest
from support.command_lines import configured, problems_of, without

from megatron.data.datasets.fim_dataset import GPTFIMDatasetConfig
from megatron.data.tokenizer.null import NullTokenizer
from megatron.training.data.gpt_data import gpt_dataset_config, gpt_dataset_kind


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
