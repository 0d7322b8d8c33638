"""A Hugging Face config without weights gives the flags of its model."""

from pathlib import Path

import pytest

from megatron.conversion.config_flags import describe_config
from megatron.conversion.families import FAMILIES
from megatron.conversion.importing import open_hub_model
from megatron.core.exceptions import UserError

transformers = pytest.importorskip("transformers")


def config() -> "transformers.LlamaConfig":
    return transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip


def test_its_flags_are_those_of_the_folder_that_the_model_writes(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(config()).save_pretrained(tmp_path)
    hub = open_hub_model(tmp_path, tmp_path, (), FAMILIES, print)
    found = describe_config(config().to_diff_dict() | {"architectures": ["LlamaForCausalLM"]})
    assert found.flags == hub.flags[: len(found.flags)] and "--num-query-groups" in found.flags
    assert (found.vocab_size, found.max_length, found.model_family) == (48, 32, "gpt")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, r"NAME: architectures is \[\] and model_type is None; architectures must name one of Llama"),
        ({"architectures": ["Unheard"]}, "NAME: architectures: .*Unheard"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "strange": 1}, "NAME: strange is not known"),
    ],
)
def test_a_mistake_names_the_key(keys: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        describe_config(keys, "NAME")
