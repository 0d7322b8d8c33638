"""What --help prints."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
from support.command_lines import SMALL, problems_of, words_of
from support.each import for_each

from megatron.core.declarations.config_fields import FlagDeclaration
from megatron.training.config.command_line import read_command_line
from megatron.training.config.conditions import is_to_come
from megatron.training.config.flag_table import Flag, flag_table, flags_by_spelling
from megatron.training.config.help_text import Answer, answers, help_about, help_of_flags, help_text
from megatron.training.config.unsupported_flags import refusal_of


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


ROOT = Path(__file__).parents[3]
NAMES = (ROOT / "tests/data/flags/megatron_lm_names.txt").read_text("utf-8").split()
ANSWERS = {spelling: answer for answer in answers() for spelling in answer.spellings}


def test_every_flag_of_megatron_lm_has_one_answer() -> None:
    assert [name for name in NAMES if name not in ANSWERS] == []
    spellings = [spelling for answer in answers() for spelling in answer.spellings]
    assert len(spellings) == len(set(spellings))


def test_a_flag_that_turns_something_off_says_so() -> None:
    """The help is written for the flag, or it is the docstring of the field with "do not" before one of these verbs."""
    verbs = "accumulate add all-gather apply clamp collect compute create cut divide keep orthogonalise overlap put"
    verbs += " reduce reduce-scatter round share split use write"
    flags = [flag for flag in flag_table().values() if flag.turns_off]
    assert len(flags) > 40
    for flag in flags:
        topic_and_verb = re.match(r"(?:[^.:]*: do|Do) not ([\w-]+) ", flag.help)
        assert flag.declaration.off_help or (topic_and_verb and topic_and_verb[1] in verbs.split()), flag.help
    assert ANSWERS["--disable-bias-linear"].meaning.endswith("without biases.")


def test_every_honoured_flag_is_named_by_a_test() -> None:
    about_tables = {"test_flags_page.py", "test_flag_answers.py", "test_flag_table.py", "test_help_text.py"}
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name not in about_tables]
    words = {word for path in files for word in re.findall(r"--[\w-]+|\w+", path.read_text("utf-8"))}
    fields = [flag for flag in flag_table().values() if ANSWERS[flag.spelling].kind == "honoured"]
    unnamed = {flag.spelling for flag in fields if words.isdisjoint({*flag.spellings, flag.field})}
    assert unnamed == NAMED_BY_PARAMETER


NAMED_BY_PARAMETER = {
    "--tokenizer-hf-include-special-tokens",
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
    "--pytorch-profiler-collect-callstack",
    "--pytorch-profiler-collect-shapes",
    "--no-manual-gc-eval",
    "--record-shapes",
}
"""Flags whose tests name the parameter that the flag sets."""


@for_each(sorted(ANSWERS))
def test_a_flag_is_answered_as_it_is_said_to_be(spelling: str, tmp_path: Path) -> None:
    answer: Answer = ANSWERS[spelling]
    flag = flags_by_spelling().get(spelling)
    words = words_of(flag) if flag is not None else ["1"] if spelling in NEEDS_A_WORD else []
    words = [os.devnull] if spelling in ("--config", "--yaml-cfg") else words
    words = ["llama3-8b"] if spelling == "--recipe" else words
    if flag is not None and flag.field in ("deepspeed_config", "accelerate_config"):
        words = [str(tmp_path / "empty.json")]
        (tmp_path / "empty.json").write_text("{}")
    line = read_command_line([*SMALL.split(), spelling, *words])
    if answer.kind == "translated":
        assert any(spelling in warning for warning in line.warnings) and not line.problems
    elif flag is None:
        said = line.warnings if answer.kind == "accepted without effect" else line.problems
        assert said == [f"{spelling}: {answer.reason}"]
        assert not (line.problems if answer.kind == "accepted without effect" else line.warnings)
    else:
        assert not line.problems and spelling in line.given.values()
        alone = is_to_come(flag) and not flag.declaration.only_with
        if alone and line.values[flag.field] != flag.default:
            problems = problems_of(f"{spelling} {' '.join(words)}")
            assert any(text.startswith(spelling) and answer.reason in text for text in problems), problems


def test_a_flag_that_never_works_has_its_reason() -> None:
    for flag in flag_table().values():
        supported = flag.declaration.supported
        nothing = supported is not None and all(value is None or value is False for value in supported)
        assert refusal_of(flag.spelling) or not (nothing or is_to_come(flag)), flag.spelling


NEEDS_A_WORD = {"--batch-size", "--model-parallel-size", "--checkpoint-num-layers", "--yarn-beta-fast"} | {
    "--activations-checkpoint-num-layers", "--yarn-beta-slow", "--yarn-original-max-position-embeddings",
    "--hybrid-override-pattern", "--layernorm-epsilon", "--local_rank", "--s3-cache-path",
}  # fmt: skip
"""Flags that are translated into one with a value."""


def test_the_list_of_names_is_that_of_the_releases() -> None:
    known = (ROOT / "tests/data/flags/megatron_lm_flags.jsonl").read_text("utf-8").splitlines()
    assert {json.loads(line)["flag"] for line in known} <= set(NAMES) and len(NAMES) == 922
