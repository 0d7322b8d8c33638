"""Patterns over layers, layouts of stages and tuples, without evaluating anything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.declarations.flag_grammars import (
    ends_of,
    integer_tuple,
    layer_pattern,
    number_or_range,
    pipeline_layout,
    window,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("([0]*3+[1]*58)", [0] * 3 + [1] * 58),
        ("[0]*3+[1]*58", [0] * 3 + [1] * 58),
        ("([0,1]*24)", [0, 1] * 24),
        ("([0]+[1]*26)", [0] + [1] * 26),
        ("2*[1, 0]", [1, 0, 1, 0]),
        ("([0]*(1+2))", [0] * 3),
        ("[1,2*3]", [1, 6]),
        ("[]", []),
        ("[1,]", [1]),
    ],
)
def test_layer_patterns(text: str, value: int | list[int]) -> None:
    assert layer_pattern(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "x", "", "[", "[1", "[1]]", "([1]", "[1]+2", "[1]*[2]", "[[1]]", "[1];", "__import__('os')[0]", "[1]*9999999",
        "[1]**2", "[1 2]", "[1]+", "[-1]",
    ],
)  # fmt: skip
def test_everything_else_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        layer_pattern(text)


def test_a_word_that_is_no_pattern_is_told_what_is() -> None:
    with pytest.raises(ValueError, match=r"neither a number nor a list expression such as \(\[0\]\*3"):
        layer_pattern("every-second")


@settings(deadline=None)
@given(st.text(alphabet="0123456789[]()+*, ", max_size=30))
def test_no_text_gives_anything_but_a_value_or_a_value_error(text: str) -> None:
    try:
        value = layer_pattern(text)
    except ValueError:
        return
    assert isinstance(value, int) or all(isinstance(item, int) for item in value)


@pytest.mark.parametrize(
    ("text", "value"), [("127,0", (127, 0)), ("(127,0)", (127, 0)), ("-1,0", (-1, 0)), ("( 8 , 8 )", (8, 8))]
)
def test_tuples(text: str, value: tuple[int, ...]) -> None:
    assert integer_tuple(text) == value


def test_a_tuple_of_words_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        integer_tuple("a,b")


@pytest.mark.parametrize(("text", "value"), [("127,0", (127, 0)), ("(-1,3)", (-1, 3))])
def test_a_window_has_two_sides(text: str, value: tuple[int, ...]) -> None:
    assert window(text) == value


@pytest.mark.parametrize("text", ["7", "7,0,1", "a,b", ""])
def test_anything_else_is_no_window(text: str) -> None:
    with pytest.raises(ValueError, match="expected two numbers, tokens before and after, as 127,0"):
        window(text)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Ettt|(tt|)*2,m|L", ["Ettt", "tt", "tt", "m", "L"]),
        ("Et*2|*2t|L", ["Ett", "", "t", "L"]),
        ("E t|tL", ["Et", "tL"]),
        ("(Et|)*1(t|t)*2L", ["Et", "t", "tt", "tL"]),
        (r"Et\(tt|\)*2L", ["Ettt", "tt", "L"]),
    ],
)
def test_the_grammar_of_layouts(text: str, stages: list[str]) -> None:
    assert pipeline_layout(text) == stages


def test_brackets_inside_each_other() -> None:
    assert layer_pattern("(" * 90 + "[1]" + ")" * 90) == [1]
    for deep in ("(" * 5000 + "[1]" + ")" * 5000, "[" * 5000 + "1" + "]" * 5000):
        with pytest.raises(ValueError, match=r"\.\.\. has more than 100 brackets inside each other"):
            layer_pattern(deep)


@pytest.mark.parametrize("text", ["Et|x|L", "E((t|)*2)*2L", "Et*|L", "(Et|L)", "Et*9999999|L", "", "Et{0}|L"])
def test_what_is_no_layout_is_an_error(text: str) -> None:
    if text == "":
        assert pipeline_layout(text) == [""]
        return
    with pytest.raises(ValueError, match=r"is out of place|longer than a million"):
        pipeline_layout(text)


@pytest.mark.parametrize(("text", "value", "ends"), [("7", 7, (7, 7)), ("7-9", "7-9", (7, 9)), ("7-7", "7-7", (7, 7))])
def test_numbers_and_ranges(text: str, value: int | str, ends: tuple[int, int]) -> None:
    assert number_or_range(text) == value and ends_of(value) == ends


@pytest.mark.parametrize("text", ["", "x", "-3", "3-", "1.5", "3-4-5", "9" * 30, "9-7"])
def test_what_is_neither_a_number_nor_a_range(text: str) -> None:
    with pytest.raises(ValueError, match="7-9 works" if text == "9-7" else "a range such as 100-120"):
        number_or_range(text)
