"""From a field's type annotation to the words of the command line."""

import enum
from typing import Any, Literal

import pytest

from megatron.training.config.flag_words import number, takes_one_or_list, whole_number, word_type


class Color(enum.Enum):
    red = 1
    blue = 2


@pytest.mark.parametrize(
    ("annotation", "word", "value", "is_list"),
    [
        (int, "3", 3, False),
        (float | None, "1e-3", 1e-3, False),
        (str | None, "x", "x", False),
        (Literal["a", "b"] | None, "b", "b", False),
        (Literal[0, 1], "1", 1, False),
        (list[int] | None, "3", 3, True),
        (str | list[str], "x", "x", True),
        (Color, "blue", Color.blue, False),
    ],
)
def test_the_annotation_says_how_a_word_is_parsed(annotation: Any, word: str, value: object, is_list: bool) -> None:
    words = word_type(annotation)
    assert words.parse(word) == value and words.is_list is is_list


def test_choices_are_named_when_a_word_is_none_of_them() -> None:
    assert word_type(Color).choices == ("red", "blue") and word_type(int).choices is None
    for annotation, message in ((Color, "choose from red, blue"), (Literal["a", "b"], "choose from a, b")):
        with pytest.raises(ValueError, match=message):
            word_type(annotation).parse("c")


def test_one_word_or_a_list() -> None:
    assert takes_one_or_list(str | list[str]) and not takes_one_or_list(list[str]) and not takes_one_or_list(str | None)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("abc", "expected a whole number"),
        ("1e6", "1000000 works"),
        ("10.0", "10 works"),
        ("inf", "whole number"),
        ("9" * 30, "at most 9223372036854775807"),
    ],
)
def test_whole_numbers(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        whole_number(word)


@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "x", ""])
def test_numbers_are_finite(word: str) -> None:
    with pytest.raises(ValueError):
        number(word)
