"""What a checkpoint records and what --print-config prints is read back to the same values, for every flag."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_lines import ENTRY_DEFAULTS, SMALL

import pretrain_mamba
from megatron.core.declarations.flag_grammars import layer_pattern, number_or_range, window
from megatron.training.arguments import configure
from megatron.training.config.command_line import read_command_line
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.flag_words import number, whole_number
from megatron.training.config.recorded_flags import read_recorded
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.config.training import SOURCES_OF_FLAGS
from megatron.training.inspection.print_config import config_lines
from megatron.training.inspection.run_description import command_line_of

TEXTS = [
    *("plain", "a b", "", "--x", "--x=1", "-h", "-", "---", "--", "-x", "null", "true", "~", "1e5", ".5", "=", "<<"),
    *("#x", "a #b", "a: b", "[a]", "{a}", "*a", "&a", "!a", "%a", "@a", "`a", "a,b", "|", "?", "'", '"', "\\", "\\n"),
    *("é", "字", "\U0001f600", "\u2028", "\x85", "\x7f", "\x00", "a\nb: c", "\t", " a ", "\udc80", "\ufeff", "\ue000"),
]
WORDS: dict[Callable[[str], Any], list[str]] = {
    str: TEXTS,
    whole_number: ["0", "-1", "7", str(2**63 - 1), str(-(2**63))],
    number: ["0", "-1.5", "0.1", "1e-5", "3", "1e22", "0.30000000000000004", "-1e-300"],
    layer_pattern: ["4", "[0,1,1]", "([0]*2+[1]*3)", "[1]", "[]"],
    window: ["127,0", "(-1,0)", "3,-1"],
    number_or_range: ["7", "100-120"],
}
"""Words of each grammar. A new grammar needs some here."""


def words_for(flag: Flag) -> list[list[str]]:
    """Returns command lines of one flag, one for each kind of value."""
    if flag.switch is not None:
        return [[spelling] for spelling in flag.switch]
    values = list(flag.choices) if flag.choices is not None else WORDS[flag.parse]
    first = [[f"{flag.spelling}={word}"] for word in values]
    if flag.nargs is None:
        return first
    if isinstance(flag.nargs, int):
        return [[f"{flag.spelling}={word}", *[values[0]] * (flag.nargs - 1)] for word in values]
    plain = [word for word in values if not word.startswith("--") and word != "-h"]
    return [*first, [*first[-1], *plain], *([[flag.spelling]] if flag.nargs == "*" else [])]


def rounds() -> list[list[str]]:
    """Returns command lines that together give every flag every value. Flags that act are left out."""
    table = [words_for(flag) for field, flag in flag_table().items() if field not in ACTING]
    longest = max(len(words) for words in table)
    return [[word for words in table if at < len(words) for word in words[at]] for at in range(longest)]


ACTING = (*SOURCES_OF_FLAGS, "print_config", "dry_run", "mock_data")
"""Flags that act on others, or that a file cannot give."""


def described(values: dict[str, Any], given: dict[str, str]) -> Any:
    """A config whose values were given, for functions that describe configs."""
    provenance = dict.fromkeys(values, "default") | dict.fromkeys(given, "flag")
    return SimpleNamespace(flat=lambda: values, provenance=provenance, extra={}, parts=list)


def test_every_value_of_every_flag(tmp_path: Path) -> None:
    assert read_command_line(rounds()[0]).given.keys() == flag_table().keys() - ACTING
    for words in rounds():
        check(words, tmp_path)


def check(words: list[str], tmp_path: Path) -> None:
    """Gives flags, and compares their values with those of what is recorded, and of what is printed."""
    line = read_command_line(words)
    assert not line.problems
    config = described(line.values, line.given)
    recorded = read_recorded(json.loads(json.dumps(command_line_of(config))))
    assert recorded.values == line.values and not recorded.problems and recorded.given.keys() == line.given.keys()
    file = tmp_path / "printed.yaml"
    file.write_text("\n".join(config_lines(config)), encoding="utf-8")
    printed = read_command_line(["--config", str(file)])
    assert not printed.problems
    assert printed.values == line.values | {"config_file": [str(file)]}


FAMILIES = {
    "gpt": ({"model_family": "gpt"}, "--bf16 --swiglu --group-query-attention --num-query-groups 2 --window-size 5,0"),
    "bert": (ENTRY_DEFAULTS["pretrain_bert.py"], "--bert-no-binary-head --fp16 --initial-loss-scale 1024"),
    "mamba": (pretrain_mamba.DEFAULTS, "--hybrid-layer-pattern M* --mamba-head-dim 16 --mamba-state-dim 8"),
    "t5": (ENTRY_DEFAULTS["pretrain_t5.py"], "--encoder-num-layers 3 --decoder-seq-length 16 --vocab-extra-ids 20"),
}
STATE = (
    "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16 "
    "--main-params-dtype fp16 --main-grads-dtype bf16"
)


@pytest.mark.parametrize("extra", ["", STATE])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_of_every_entry_script(family: str, extra: str, tmp_path: Path) -> None:
    defaults, flags = FAMILIES[family]
    words = f"{SMALL} {flags.replace('--fp16', '') if extra else flags} {extra}".split()
    if family in ("bert", "t5"):
        vocabulary = Path(__file__).parents[2] / "data/golden/corpus/bert/vocab.txt"
        words += ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(vocabulary)]
    environment = LaunchEnvironment(1, False)

    def of(words: list[str]) -> dict[str, Any]:
        config = configure(words, None, defaults, launch_environment=environment)
        return {name: value for name, value in config.flat().items() if not callable(value)} | {"config_file": None}

    config = configure(words, None, defaults, launch_environment=environment)
    file = tmp_path / "printed.yaml"
    file.write_text("\n".join(config_lines(config)), encoding="utf-8")
    assert of(words) == of(command_line_of(config)) == of(["--config", str(file)])
