"""Pieces of text join to the whole, wherever tokens cut characters and stop strings."""

import random
from collections.abc import Sequence

import pytest

from megatron.data.tokenizer.null import NullTokenizer
from megatron.serving.text_stream import TextStream


class Bytes(NullTokenizer):
    """Ids are bytes."""

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Words(NullTokenizer):
    """A blank before each word, and none at the start of a text, as SentencePiece has it."""

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(f" w{i}" for i in ids).removeprefix(" ")


TEXT = "naïve 日本語 🙂🙂 e\u0301 "


def pieces_of(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*(stream.add(i) for i in ids), stream.finish()]


def test_characters_of_several_tokens_come_whole() -> None:
    pieces = pieces_of(TextStream(Bytes(256)), (TEXT * 9).encode())
    assert "".join(pieces) == TEXT * 9 and "\ufffd" not in "".join(pieces)
    assert pieces[:5] == ["n", "a", "", "ï", "v"]


def test_bytes_that_are_no_text_are_told() -> None:
    for seed in range(30):
        ids = random.Random(seed).choices([0xE6, 0x97, 0xA5, 0x41, 0xFF, 0xF0, 0x80], k=120)
        assert "".join(pieces_of(TextStream(Bytes(256)), ids)) == bytes(ids).decode(errors="replace")


def test_the_blank_after_the_prompt() -> None:
    assert pieces_of(TextStream(Words(9), [4, 5]), [1, 2]) == [" w1", " w2", ""]
    assert pieces_of(TextStream(Words(9)), [1, 2]) == ["w1", " w2", ""]
    long = list(range(1, 9)) * 20
    assert "".join(pieces_of(TextStream(Words(9), [3]), long)) == "".join(f" w{i}" for i in long)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two", ["two"], "one "),
        ("one two", [" t", "one two"], "one"),
        ("one twx two", ["two"], "one twx "),
        ("aaab", ["aab"], "a"),
        ("日本語", ["本"], "日"),
        ("one tw", ["two"], "one tw"),
        ("ends", ["s"], "end"),
    ],
)
def test_stop_strings(text: str, stops: list[str], expected: str) -> None:
    stream = TextStream(Bytes(256), stops=stops)
    pieces = []
    for number in text.encode():
        pieces.append(stream.add(number))
        assert expected.startswith("".join(pieces)), "a piece had a part of a stop string"
    pieces.append(stream.finish())
    assert "".join(pieces) == expected and stream.stopped == (expected != text)
    assert stream.length == len(expected) and stream.add(65) == ""


def test_a_prompt_that_ends_within_a_character() -> None:
    first, *rest = "é!".encode()
    assert "".join(pieces_of(TextStream(Bytes(256), [65, first]), rest)) == "é!"
