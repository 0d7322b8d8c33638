"""megatron/data/cleaning/quality.py: each rule by a text that breaks it, beside one just inside."""

import pytest

from megatron.data.cleaning.quality import c4, c4_lines, compile_blocklist, gopher_quality, gopher_repetition, lengths

WORDS = [f"word{number}" for number in range(100)]
GOOD = " ".join(WORDS)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (GOOD, None),
        (" ".join(WORDS[:49]), "words"),
        (" ".join(WORDS[:50]), None),
        ("word " * 100_001, "words"),
        ("ab " * 60, "mean word length"),
        ("abc " * 60, None),
        ("abcdefghijk " * 60, "mean word length"),
        (GOOD + " #abc" * 12, "symbols per word"),
        (GOOD + " #abc" * 11, None),
        (GOOD + " abc…" * 12, "symbols per word"),
        ("".join(f"-{word} abc\n" for word in WORDS) + "one\n" * 11, "lines that begin with a bullet"),
        ("".join(f"-{word} abc\n" for word in WORDS) + "one\n" * 12, None),
        ("".join(f"{word} abc def ghi{'...' * (i % 3 == 0)}\n" for i, word in enumerate(WORDS)), "lines that end with"),
        ("".join(f"{word} abc def ghi{'...' * (i % 4 == 0)}\n" for i, word in enumerate(WORDS)), None),
        (GOOD + " 12345" * 26, "words with a letter"),
        (GOOD + " 12345" * 25, None),
    ],
)
def test_gopher_quality(text, rule):
    broken = gopher_quality(text)
    assert broken is None if rule is None else broken is not None and rule in broken


def sentences(first: int, count: int) -> str:
    return " ".join(f"w{first + number}" for number in range(count))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (GOOD, None),
        ("\n".join([sentences(i * 10, 10) for i in range(6)] + ["x"] * 4), None),
        ("\n".join([sentences(i * 10, 10) for i in range(6)] + ["x"] * 5), "duplicate lines"),
        (
            "\n".join([sentences(i * 10, 5) for i in range(8)] + [sentences(500, 10)] * 3),
            "characters in duplicate lines",
        ),
        (
            "\n\n".join([sentences(i * 10, 10) + "\n" + sentences(300 + i, 1) for i in range(5)] + ["x"] * 9),
            "duplicate",
        ),
        (" ".join(f"the same w{i}" for i in range(40)), "most frequent 2-gram"),
        (sentences(0, 300) + " a b c d e", None),
        (sentences(0, 40) + " " + sentences(1000, 10) + " x " + sentences(20, 20), "in duplicate 5-grams"),
        (sentences(0, 100) + " x " + sentences(0, 11), None),
        (sentences(0, 100) + " x " + sentences(0, 15), "in duplicate 10-grams"),
    ],
)
def test_gopher_repetition(text, rule):
    broken = gopher_repetition(text)
    assert broken is None if rule is None else broken is not None and rule in broken


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("This is the first one. And this a second! Is there another?", None),
        ("This is the first one. And this a second!", "sentences"),
        ("Lorem Ipsum this is one. And this a second! Is there another?", "lorem ipsum"),
        ("f() { This is one. And this a second! Is there another?", "curly"),
        ("第 一 句 很 好 话。第二句话。第三句话。", None),
    ],
)
def test_c4(text, rule):
    broken = c4(text)
    assert broken is None if rule is None else broken is not None and rule in broken


def test_c4_lines():
    good = "This line has five words."
    assert (
        c4_lines(f"{good}\nThis line has no end mark\nIt has four words.\nPlease enable JavaScript on this page.")
        == good
    )


def test_lengths_and_blocklist():
    assert [lengths(text, 2, 3) for text in ("a", "ab", "abc", "abcd")] == [
        "length: too short",
        None,
        None,
        "length: too long",
    ]
    blocked = compile_blocklist(iter(["bad word\n", "", "c++\n"]))
    assert blocked is not None
    assert [bool(blocked.search(text)) for text in ("a Bad Word.", "bad words", "in C++, yes", "good")] == [
        True,
        False,
        True,
        False,
    ]
    assert compile_blocklist(iter(["\n"])) is None
