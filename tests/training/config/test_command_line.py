"""Words to values: kinds of flags, mistakes, retired flags, arguments of scripts."""

import argparse
from pathlib import Path

import pytest
from support.command_lines import problems_of

from megatron.training.config.command_line import read_command_line, split_words, unknown_flag
from megatron.training.config.flag_table import flags_by_spelling
from megatron.training.config.retired import Occurrence


def read(words: str) -> dict[str, object]:
    line = read_command_line(words.split())
    assert line.problems == []
    return line.values


def complaints(words: str) -> list[str]:
    return read_command_line(words.split()).problems


# ---------------------------------------------------------------------------------------------------------------------
# Values


def test_each_kind_of_value() -> None:
    values = read(
        "--num-layers 3 --lr 1e-3 --swiglu --disable-bias-linear --normalization RMSNorm --data-path 1 a 2 b "
        "--window-size (127,0) --moe-layer-freq ([0]*3+[1]*2) --rampup-batch-size 1 2 30 --attention-backend unfused "
        "--exit-signal SIGUSR1 --profile-ranks 0 1 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type none"
    )
    assert values["num_layers"] == 3 and values["lr"] == 1e-3
    assert values["swiglu"] is True and values["add_bias_linear"] is False
    assert values["normalization"] == "RMSNorm" and values["data_path"] == ["1", "a", "2", "b"]
    assert values["window_size"] == (127, 0) and values["moe_layer_freq"] == [0, 0, 0, 1, 1]
    assert values["rampup_batch_size"] == [1, 2, 30] and values["profile_ranks"] == [0, 1]
    assert values["attention_backend"].name == "unfused" and values["exit_signal"].name == "SIGUSR1"
    assert values["moe_aux_loss_coeff"] == 0.1 and values["moe_router_load_balancing_type"] == "none"
    assert read("--moe-aux-loss-coeff 0.1 0.2")["moe_aux_loss_coeff"] == [0.1, 0.2]


def test_equals_signs_and_negative_numbers() -> None:
    assert read("--lr=1e-3")["lr"] == 1e-3
    assert read("--null-tokenizer-pad-id -1 --window-size -1,0")["window_size"] == (-1, 0)
    assert read_command_line(["--data-path=--odd"]).values["data_path"] == ["--odd"]


def test_made_up_data_replaces_the_data_sets_before_it(tmp_path: Path) -> None:
    """So that any command can be tried by flags at its end. In the other order it is a contradiction."""
    line = read_command_line(["--data-path", "1", "a", "--valid-data-path", "b", "--mock-data"])
    assert line.values["data_path"] is line.values["valid_data_path"] is None and line.values["mock_data"]
    assert line.warnings == [
        "--mock-data replaces --data-path 1 a, which is before it",
        "--mock-data replaces --valid-data-path b, which is before it",
    ]
    later = read_command_line(["--mock-data", "--data-path", "a"])
    assert later.values["data_path"] == ["a"] and later.values["mock_data"] and not later.warnings
    file = tmp_path / "run.yaml"
    file.write_text("data_path: [a]\n")
    from_file = read_command_line(["--config", str(file), "--mock-data"])
    assert from_file.values["data_path"] is None and "data_path" not in from_file.given
    assert from_file.warnings == ["--mock-data replaces --data-path of the config file"]


def test_an_empty_word_is_shown_in_quotes() -> None:
    assert read_command_line(["--lr", ""]).problems == ["--lr '': expected a number"]


def test_quotes_that_a_shell_left_in_a_word_reach_the_value() -> None:
    assert read("--split '99,1,0'")["split"] == "'99,1,0'"


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr abc", "--lr abc: expected a number"),
        ("--lr", "--lr: a value is missing"),
        ("--lr 1 2", "--lr 1 2: takes one value; 2 belongs to no flag"),
        (
            "--lr 1 -num-layers 2",
            "--lr 1 -num-layers 2: takes one value; -num-layers 2 belongs to no flag; flags begin ",
        ),
        (
            "--lr 1 \u2014num-layers 2",
            "--lr 1 \u2014num-layers 2: takes one value; \u2014num-layers 2 belongs to no flag; flags",
        ),
        ("--window-size 7", "--window-size 7: expected two numbers, tokens before and after, as 127,0"),
        ("--num-layers 2.5", "--num-layers 2.5: expected a whole number; 2 works"),
        ("--swiglu yes", "--swiglu yes: this flag takes no value"),
        ("--normalization Norm", "--normalization Norm: choose from LayerNorm, RMSNorm"),
        (
            "--position-embedding-type yarn",
            "--position-embedding-type yarn: give --position-embedding-type rope "
            "--rope-scaling-type yarn (with --multi-latent-attention",
        ),
        (
            "--position-embedding-type alibi",
            "--position-embedding-type alibi: give --position-embedding-type none --alibi",
        ),
        ("--position-embedding-type rop", "--position-embedding-type rop: choose from learned_absolute, rope"),
        ("--normalization", "--normalization: a value is missing; choose from LayerNorm, RMSNorm"),
        ("--rampup-batch-size 1 2", "--rampup-batch-size 1 2: takes 3 values, not 2"),
        ("--moe-layer-freq [1", "--moe-layer-freq [1: '[1': a bracket is not closed"),
        ("train --lr 1", "train: this word belongs to no flag"),
        ("--exit-signal 15", "--exit-signal 15: choose from SIGHUP"),
    ],
)
def test_a_wrong_value_names_flag_value_and_what_works(words: str, message: str) -> None:
    assert complaints(words)[0].startswith(message)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--hiden-size", "--hiden-size: unknown flag; did you mean --hidden-size"),
        ("--num_layers", "--num_layers: unknown flag; did you mean --num-layers?"),
        ("--micro-batch", "--micro-batch: flags are not shortened here; did you mean --micro-batch-size?"),
        ("--rl-profile", "--rl-profile: reinforcement learning is out of scope"),
        ("--xyzzy", "--xyzzy: unknown flag; --help all lists all"),
        ("--foo", "--foo: unknown flag; --help all lists all"),  # only its dashes are like those of --sft
    ],
)
def test_an_unknown_flag_gets_a_suggestion(flag: str, message: str) -> None:
    assert unknown_flag(flag, flags_by_spelling()).startswith(message)


def test_flags_whose_dashes_went_wrong_are_spelled_out() -> None:
    for dashes in ("-", "\u2013", "\u2014", "\u2013\u2013"):
        (problem,) = complaints(f"--lr 1 {dashes}num-layers 2")
        assert problem.endswith("; flags begin with two dashes: --num-layers")
    assert complaints("--lr 1 -2")[0].endswith("-2 belongs to no flag")


def test_abbreviations_are_not_taken() -> None:
    assert problems_of("--global-batch 4") and problems_of("--global-batch=4")


def test_all_mistakes_are_told_at_once() -> None:
    problems = problems_of("--lr abc --hiden-size 3 --swiglu 1 --global-batch-size 5 --bf16 --fp16 --inprocess-restart")
    assert [problem.split()[0] for problem in problems] == [
        "--lr", "--hiden-size:", "--swiglu", "--inprocess-restart:", "--fp16", "--global-batch-size",
    ]  # fmt: skip


def test_nothing_more_is_said_about_a_value_that_could_not_be_read() -> None:
    assert problems_of("--micro-batch-size x --global-batch-size 7") == [
        "--micro-batch-size x: expected a whole number"
    ]


def test_split_words() -> None:
    occurrences, strays = split_words(["a", "--x", "1", "-2", "--y=3", "4", "-h"])
    assert strays == ["a"]
    assert occurrences == [Occurrence("--x", ("1", "-2")), Occurrence("--y", ("3", "4")), Occurrence("-h")]


# ---------------------------------------------------------------------------------------------------------------------
# Arguments of a script


def with_two(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("mine")
    group.add_argument("--my-number", type=int, default=3)
    group.add_argument("--my-switch", action="store_true")
    parser.set_defaults(num_layers=7)
    return parser


def test_a_script_adds_arguments_and_defaults() -> None:
    line = read_command_line(["--my-number", "4", "--lr", "1"], with_two)
    assert line.problems == [] and line.extra == {"my_number": 4, "my_switch": False}
    assert line.values["num_layers"] == 7 and line.script == {"num_layers"}
    assert read_command_line(["--num-layers", "2"], with_two).values["num_layers"] == 2


def test_mistakes_in_a_scripts_arguments_join_the_others() -> None:
    line = read_command_line(["--my-number", "x", "--lr", "y"], with_two)
    assert len(line.problems) == 2 and "my-number" in line.problems[1]


def test_a_missing_required_argument_of_a_script_is_told() -> None:
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--wanted", required=True)
        return parser

    assert "--wanted" in read_command_line([], provider).problems[0]


def test_a_flag_that_exists_cannot_be_added() -> None:
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--num-layers")
        return parser

    assert "--num-layers" in read_command_line([], provider).problems[0]


def test_a_provider_that_forgets_to_return_the_parser_is_told() -> None:
    assert read_command_line([], lambda parser: None).problems == [  # type: ignore[arg-type,return-value]
        "extra_args_provider must return the parser that it was given"
    ]


def test_unknown_flags_can_be_let_through() -> None:
    line = read_command_line(["--mine", "3", "--lr", "1"], ignore_unknown_args=True)
    assert line.problems == [] and line.warnings == ["--mine: unknown, and ignored as the script asks"]


def test_of_a_repeated_flag_the_last_counts_and_a_line_says_so() -> None:
    line = read_command_line(["--lr", "1", "--lr", "2", "--bf16", "--bf16", "--seed", "5", "--seed", "5"])
    assert line.values["lr"] == 2.0 and line.problems == []
    assert line.warnings == ["--lr 2 replaces --lr 1, which is before it on the command line"]


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("--help --lr 3", "  --lr X "),
        ("--help lr", "  --lr X "),
        ("--help=--lr", "  --lr X "),
        ("--num-layers 2 --help", "usage: "),
        ("--help --DDP-impl", "--DDP-impl: Retired"),
    ],
)
def test_help_is_about_the_flag_that_follows(words: str, begins: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        read_command_line(words.split())
    assert stop.value.code == 0 and capsys.readouterr().out.startswith(begins)


def test_help_about_a_flag_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--frozen", type=int, help="Layers that stay.")
        return parser

    with pytest.raises(SystemExit):
        read_command_line(["--help", "--frozen"], add)
    assert "Layers that stay." in capsys.readouterr().out


def test_the_last_unknown_flag_names_the_tool_that_rewrites_scripts() -> None:
    first, last = complaints("--hiden-size 3 --xyzzy")
    assert not first.endswith(")") and last.endswith(
        "(tools/migrate_args.py rewrites commands and scripts of other releases of Megatron-LM)"
    )
