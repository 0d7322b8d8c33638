"""The flags that a checkpoint records: parsed, but not acted on."""

import pytest

from megatron.core.exceptions import UserError
from megatron.training.config.recorded_flags import check_spec, flags_of_model, read_recorded, recorded_words


def test_a_description_without_words_is_refused():
    for wrong in ("--hidden-size 32", [1], None, {"a": 1}):
        with pytest.raises(UserError, match="command_line is not a list of words"):
            recorded_words({"command_line": wrong})
    assert recorded_words({}) == []


def test_words_that_act_are_only_parsed(tmp_path) -> None:
    """No help is printed, and no file is read."""
    line = read_recorded(f"--help all --config {tmp_path}/none.yaml -h --yaml-cfg none --unknown 3 --lr 0.1".split())
    assert not line.problems and line.values["lr"] == 0.1


def test_flags_of_older_releases_have_their_names_of_today() -> None:
    assert read_recorded(["--model-parallel-size", "2"]).values["tensor_model_parallel_size"] == 2


def test_only_what_may_come_from_a_checkpoint_is_taken() -> None:
    words = "--spec os abort --save /etc --hidden-size 8 --hybrid-layer-pattern M|M/*- --tokenizer-model=--x"
    taken = [one.as_words() for _, one in flags_of_model(words.split(), lambda flag: True)]
    assert taken == [["--hidden-size", "8"], ["--hybrid-layer-pattern", "MM/*-"], ["--tokenizer-model=--x"]]


def test_code_is_given_again() -> None:
    for words in (["--spec", "local"], ["--hidden-size", "8"], ["--spec"]):
        check_spec(words, given=False)
    check_spec(["--spec", "a", "b"], given=True)
    with pytest.raises(UserError, match="--spec a b, which is code, and no code is taken from a checkpoint"):
        check_spec(["--spec", "a", "b"], given=False)
