"""Every option of Megatron-LM 0.19 is honoured, accepted with a reason, or refused with a reason.

tests/data/flags/megatron_lm_flags_019.jsonl lists the options of its parser: spellings, type, number of words, choices.
"""

import json
from pathlib import Path
from typing import Any

from support.command_lines import SMALL
from support.each import for_each

from megatron.training.config.command_line import read_command_line
from megatron.training.config.conditions import is_to_come
from megatron.training.config.flag_table import flags_by_spelling
from megatron.training.config.help_text import answers

DATA = Path(__file__).parents[2] / "data/flags/megatron_lm_flags_019.jsonl"
OPTIONS: list[dict[str, Any]] = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]
ANSWERS = {spelling: answer for answer in answers() for spelling in answer.spellings}
HELP = ["-h", "--help"]

NUMBERS = {"int": "1", "float": "0.5"}
REFUSED_CHOICES = {
    "--moe-router-load-balancing-type": {"quantile_balancing"},
    "--moe-router-score-function": {"sqrtsoftplus"},
    "--optimizer": {"adaptive_muon", "lion", "soap"},
    "--position-embedding-type": {"mrope", "yarn"},
}
"""Values of 0.19 that are refused, each in a sentence that says what to give instead."""
NUMBERS_OF_SIGNALS = "--exit-signal"  # its choices are numbers; words are names of signals, as in Megatron-LM


def problems(spelling: str, words: list[str]) -> list[str]:
    return read_command_line([*SMALL.split(), spelling, *words]).problems


def test_the_table_has_all_options() -> None:
    assert len(OPTIONS) == 808 and OPTIONS[0]["flags"] == HELP


def test_every_spelling_has_an_answer_and_a_reason_unless_it_is_honoured() -> None:
    spellings = [spelling for option in OPTIONS[1:] for spelling in option["flags"]]
    assert [spelling for spelling in spellings if spelling not in ANSWERS] == []
    given = [ANSWERS[spelling] for spelling in spellings]
    assert all(answer.reason for answer in given if answer.kind != "honoured")
    assert all(answer.meaning for answer in given if answer.kind == "honoured")


def test_spellings_of_one_option_have_one_answer() -> None:
    """`--no-x` of a switch `--x` may be answered otherwise: it asks for what a run does anyway."""
    for option in OPTIONS[1:]:
        same = [spelling for spelling in option["flags"] if option["action"] != "BooleanOptional"]
        assert len({ANSWERS[spelling].kind for spelling in same}) <= 1, same


@for_each(OPTIONS[1:], lambda option: option["flags"][0])
def test_words_of_its_kind_are_read_or_the_flag_is_refused(option: dict[str, Any]) -> None:
    for spelling in option["flags"]:
        if ANSWERS[spelling].kind == "refused":
            flag = flags_by_spelling().get(spelling)
            assert (flag is not None and is_to_come(flag)) or problems(spelling, ["1"])
            continue
        if option["action"] not in ("Store", "Append"):
            assert problems(spelling, []) == []
        elif option["type"] in NUMBERS and "choices" not in option:
            count = int(option["nargs"]) if str(option["nargs"]).isdecimal() else 1
            assert problems(spelling, [NUMBERS[option["type"]]] * count) == []


@for_each([option for option in OPTIONS if "choices" in option], lambda option: option["flags"][0])
def test_every_choice_is_read_or_refused_with_what_to_give_instead(option: dict[str, Any]) -> None:
    spelling = option["flags"][0]
    if ANSWERS[spelling].kind == "refused" or spelling == NUMBERS_OF_SIGNALS:
        return
    refused = {choice: problems(spelling, [choice]) for choice in option["choices"]}
    refused = {choice: found for choice, found in refused.items() if found}
    assert refused.keys() <= REFUSED_CHOICES.get(spelling, set())
    for choice, found in refused.items():
        assert all("give " in problem and choice in problem for problem in found) and len(found) == 1
