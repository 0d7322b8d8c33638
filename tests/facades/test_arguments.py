"""Arguments of user scripts: parsed, checked, and made into configs."""

import argparse
import sys

import pytest
from support.command_lines import SMALL

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.facades.arguments import check_can_train
from megatron.training.arguments import (
    config_of_command_line,
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)
from megatron.training.config.resolution import ConfigurationError


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> "object":
    def set_to(flags: str) -> None:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags.split()])

    return set_to


def test_parse_validate_and_build(command_line) -> None:  # type: ignore[no-untyped-def]
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--mine", type=int, default=1)
        return parser

    command_line(SMALL + " --mine 5 --swiglu")
    args = parse_args(provider)
    assert args.num_layers == 2 and args.mine == 5 and args.global_batch_size is None and args.world_size == 1
    args = validate_args(args, {"tensorboard_dir": "x"})
    assert args.global_batch_size == 2 and args.ffn_hidden_size == 128 and args.tensorboard_dir == "x"
    assert args.config.transformer.ffn_hidden_size == 128
    built = core_transformer_config_from_args(args)
    assert type(built) is TransformerConfig and built.gated_linear_unit and built.ffn_hidden_size == 128
    assert built == args.config.transformer and built is not args.config.transformer


def test_arguments_go_by_flag_too_and_can_be_changed_before_they_are_checked(command_line) -> None:  # type: ignore[no-untyped-def]
    command_line(SMALL)
    args = parse_args()
    assert args.num_experts is None and args.norm_epsilon == 1e-5 and not hasattr(args, "nothing_of_the_kind")
    args.norm_epsilon = 1e-6
    args.num_layers = 3
    args.own = "x"
    validate_args(args)
    assert args.config.transformer.layernorm_epsilon == 1e-6 and args.config.transformer.num_layers == 3
    assert args.own == "x" and args.config.provenance["num_layers"] == "script"


def test_a_config_is_built_from_any_namespace_with_the_librarys_defaults() -> None:
    args = argparse.Namespace(
        num_layers=2, hidden_size=64, num_attention_heads=4, group_query_attention=True, num_query_groups=2, swiglu=True
    )
    config = core_transformer_config_from_args(args)
    assert config.num_query_groups == 2 and config.gated_linear_unit and config.attention_softmax_in_fp32


def test_a_config_from_arguments_has_the_layout(command_line) -> None:  # type: ignore[no-untyped-def]
    command_line(SMALL + " --num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2")
    args = parse_args()
    args.world_size = 2
    args = validate_args(args)
    built = core_transformer_config_from_args(args)
    assert args.virtual_pipeline_model_parallel_size == built.virtual_pipeline_model_parallel_size == 2
    assert built == args.config.transformer


def test_mistakes_end_a_script_with_2(command_line, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    command_line("--lr x")
    with pytest.raises(SystemExit) as caught:
        parse_args()
    assert caught.value.code == 2 and "error: --lr x: expected a number" in capsys.readouterr().err
    command_line(SMALL + " --global-batch-size 5")
    with pytest.raises(SystemExit):
        validate_args(parse_args())
    assert "is not divisible" in capsys.readouterr().err


def test_unknown_flags_can_be_ignored(command_line) -> None:  # type: ignore[no-untyped-def]
    command_line(SMALL + " --theirs 4")
    assert parse_args(ignore_unknown_args=True).num_layers == 2
    with pytest.raises(SystemExit):
        parse_args()
    assert config_of_command_line(ignore_unknown_args=True).transformer.num_layers == 2


def test_a_script_that_only_loads_a_model_needs_no_schedule(command_line) -> None:  # type: ignore[no-untyped-def]
    flags = SMALL.replace("--lr 1e-3", "").replace("--train-iters 10", "").replace("--mock-data", "")
    command_line(flags)
    config = validate_args(parse_args()).config
    with pytest.raises(ConfigurationError) as missing:
        check_can_train(config)
    assert [problem.partition(":")[0] for problem in missing.value.problems] == [
        "--lr is missing",
        "--train-iters or --train-samples is missing",
    ]
    command_line(f"{flags} --lr 1 --train-samples 8")
    check_can_train(validate_args(parse_args()).config)
    with pytest.raises(SystemExit):  # pretrain() trains, and asks at once
        command_line(flags)
        config_of_command_line(None, {"datasets_of_script": True})


def test_other_words_can_be_ignored_too(command_line) -> None:  # type: ignore[no-untyped-def]
    command_line(f"config.yaml {SMALL}")
    args = parse_args(ignore_unknown_args=True)
    assert "config.yaml: this word belongs to no flag, and ignored as the script asks" in args._line.warnings
    with pytest.raises(SystemExit):
        parse_args()
