"""The config of a GPT run's data sets, from its flags."""

import pytest
from support.command_lines import configured

from megatron.training.data.gpt_data import gpt_dataset_config
from megatron.training.tokenizer.null import NullTokenizer


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
    assert not made.create_attention_mask
