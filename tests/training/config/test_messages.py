"""Errors of the library name flags where the command line is the user's way to set a field."""

from types import FunctionType

import pytest

from megatron.core.declarations.config_fields import FieldError
from megatron.core.exceptions import UserError
from megatron.core.health.rerun_state_machine import initialize_rerun_state_machine
from megatron.training.config.messages import message_of


def raised(text: str, module: str = "megatron.core.transformer.attention") -> UserError:
    """Returns a UserError that a module raises with this text."""

    def fail() -> None:
        raise error

    error = UserError(text)
    with pytest.raises(UserError) as caught:
        FunctionType(fail.__code__, {"__name__": module}, closure=fail.__closure__)()
    return caught.value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mamba_num_groups: 3 is not divisible by 2", "--mamba-num-groups: 3 is not divisible by 2"),
        ("num_moe_experts 3, config.seq_length 4", "--num-experts 3, --seq-length 4"),
        ("rows of 5 tokens (seq_length) do not", "rows of 5 tokens (--seq-length) do not"),
        ("drop optimizer_cpu_offload", "drop --optimizer-cpu-offload"),
        # not fields, or not those of the command line
        ("give it qk_layernorm=True", "give it qk_layernorm=True"),
        ("encoder_config.hidden_size 3", "encoder_config.hidden_size 3"),
        ("--mock-data needs stages_of_auto_layout(config, seq_length)", None),
        ("models/num_layers.py", "models/num_layers.py"),
        ("config.no_sync_func has 2 entries", "config.no_sync_func has 2 entries"),
        ("add_bias_linear is off", "add_bias_linear is off"),  # its flag says the opposite
        ("the seed", "the seed"),
    ],
)
def test_a_field_becomes_its_flag(text: str, shown: str | None) -> None:
    error = raised(text)
    assert message_of(error) == (shown or text.replace(" seq_length", " --seq-length"))
    assert message_of(raised(text, "my_script")) == message_of(UserError(text)) == text


def test_keys_of_files_stay() -> None:
    text = "stages.json: stage 1: data_path has no prefix"
    assert message_of(raised(text, "megatron.data.datasets.blend_stages")) == text


def test_errors_that_the_library_raises() -> None:
    with pytest.raises(UserError) as caught:
        initialize_rerun_state_machine(mode="other")
    assert message_of(caught.value).startswith("--rerun-mode other: unknown")


def test_a_field_error_knows_its_fields() -> None:
    config = type("Config", (), {"num_moe_experts": 3})()
    assert message_of(FieldError(["{num_moe_experts} is odd"], config)) == "--num-experts 3 is odd"
