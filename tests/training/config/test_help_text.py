"""What --help prints."""

import dataclasses

import pytest

from megatron.core.declarations.config_fields import FlagDeclaration
from megatron.training.config.command_line import read_command_line
from megatron.training.config.flag_table import Flag, flag_table, flags_by_spelling
from megatron.training.config.help_text import help_about, help_of_flags, help_text


def entry(spelling: str) -> str:
    text = help_of_flags("usage: tool", "About.", [flags_by_spelling()[spelling]])
    return " ".join(text.split(":\n", 1)[1].split())


def test_an_entry_has_placeholder_help_and_default() -> None:
    assert entry("--log-interval") == "--log-interval N Steps between two log lines. [100]"
    assert entry("--lr-wsd-decay-style").startswith(
        "--lr-wsd-decay-style {exponential,linear,cosine,minus_sqrt} With WSD"
    )
    assert entry("--rampup-batch-size").startswith("--rampup-batch-size N N N Start with a smaller")
    assert entry("--no-bias-gelu-fusion").startswith("--no-bias-gelu-fusion Use exact GELU where linear layers have")


def test_flags_without_effect_and_unsupported_flags_are_listed_by_name() -> None:
    text = help_text("script.py", "extra help")
    working, names = text.split("accepted without effect:")
    ineffective, unsupported = names.split("not supported (")
    assert "--use-flash-attn" in ineffective and "--use-flash-attn" not in working
    assert "--batch-invariant-mode" in unsupported and "--log-interval N" in working
    assert text.startswith("usage: [torchrun ...] script.py [flags]") and text.rstrip().endswith("extra help")


def test_every_flag_appears_once() -> None:
    words = help_text("script.py").replace(",", " ").split()
    missing = [flag.spelling for flag in flag_table().values() if flag.spelling not in words]
    assert missing == []


def test_choices_that_are_not_supported_are_left_out() -> None:
    flag: Flag = flags_by_spelling()["--cuda-graph-impl"]
    assert "{none,local,transformer_engine,full_iteration}" in help_of_flags("usage", "about", [flag])
    limited = dataclasses.replace(flag, declaration=FlagDeclaration(supported=("none", "local")))
    assert "{none,local}" in help_of_flags("usage", "about", [limited])


def test_help_is_short_and_has_topics() -> None:
    overview = help_about("script.py", "", "extra help")
    assert "\ntraining:\n" in overview and "--global-batch-size" in overview and overview.endswith("extra help\n")
    assert len(overview.splitlines()) < len(help_about("script.py", "all").splitlines()) / 4
    assert "--use-flash-attn" not in overview
    section = help_about("script.py", "Checkpoints")
    assert "--save TEXT" in section and "--global-batch-size" not in section
    for topic in ("--nonfinite-action", "nonfinite-action", "nonfinite_action"):
        text = " ".join(help_about("script.py", topic).split())
        assert text.startswith("--nonfinite-action {stop,skip} What to do after") and "[stop]" in text
        assert "Has an effect only without --no-check-for-nan-in-loss-and-grad" in text
        assert "Related: --nonfinite-dump-dir --fp16" in text and "Section: faults and signals." in text


def test_help_about_flags_that_do_nothing_here() -> None:
    texts = {
        "--use-flash-attn": "Accepted without effect: --attention-backend chooses",
        "--data-parallel-random-init": "Accepted without effect: replicas have equal",
        "--mrope-section": "Refused: vision models are out of scope; for text, --position-embedding-type rope",
        "--rl-profile": "--rl-profile: Refused: reinforcement learning is out of scope",
        "--modelopt-enabled": "--modelopt-enabled: Accepted without effect: layers need",
        "--dsa-indexer-topk-freq": "Refused: every layer of sparse attention has its own indexer",
        "--DDP-impl": "--DDP-impl: Retired and ignored: there is one",
    }
    for topic, words in texts.items():
        assert words in " ".join(help_about("script.py", topic).split())


def test_help_about_nothing_known_names_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_command_line(["--help", "nothing"])
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err.startswith("error: --help nothing: no such section and no such flag; the sections are ")
    assert " checkpoints, " in err
    with pytest.raises(SystemExit) as ended:
        read_command_line(["--help", "checkpoints"])
    assert not ended.value.code and "--save-interval" in capsys.readouterr().out
