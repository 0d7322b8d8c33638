"""megatron/data/preparation/json_lines.py: which lines are accepted, and the message about the others."""

import pytest

from megatron.data.preparation.json_lines import BadLine, texts_of_line


def test_texts_and_lists():
    line = '{"a": "x é \\ud83d\\ude00", "b": ["1", "", "2"], "c": []}\r\n'.encode()
    assert texts_of_line(line, ["a", "b", "c"]) == [["x é 😀"], ["1", "", "2"], []]


@pytest.mark.parametrize(
    ("line", "fault", "message"),
    [
        (b'{"a": "x"', "not JSON", "not JSON: Expecting ',' delimiter at column 10"),
        (b'{"a": "x', "not JSON", "not JSON: Unterminated string starting at column 7"),
        (b"hello", "not JSON", "not JSON: Expecting value at column 1"),
        (b'{"a": "x"} {"a": "y"}', "not JSON", "not JSON: Extra data at column 12"),
        (b'\xef\xbb\xbf{"a": "x"}', "not JSON", "not JSON: Unexpected UTF-8 BOM (decode using utf-8-sig) at column 1"),
        (b"[" * 100_000, "not JSON", "not JSON: nested too deeply"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON", "not JSON that can be read: Exceeds the limit"),
        (b'{"a": "\xff"}', "not UTF-8", "not UTF-8: byte 0xff at column 8"),
        (b'{"a": "\xed\xa0\xbd"}', "not UTF-8", "not UTF-8: byte 0xed at column 8"),
        (b'{"b": "x", "c": 1}', "missing key", "no key 'a'; keys present: 'b', 'c'"),
        (b"{}", "missing key", "no key 'a'; keys present: none"),
        (b"[1]", "wrong type", "a list, not an object with the key 'a'"),
        (b'"x"', "wrong type", "a text, not an object with the key 'a'"),
        (b'{"a": null}', "wrong type", "key 'a' contains null, not a text or a list of texts"),
        (b'{"a": 3.5}', "wrong type", "key 'a' contains the number 3.5, not a text"),
        (b'{"a": true}', "wrong type", "key 'a' contains true, not a text"),
        (b'{"a": {"b": "c"}}', "wrong type", "key 'a' contains an object, not a text"),
        (b'{"a": ["x", 7]}', "wrong type", "key 'a' contains a list whose element 2 is the number 7, not a text"),
        (b'{"a": "\\ud83d"}', "wrong type", "key 'a' contains half of a surrogate pair"),
        (b'{"a": ["x", "\\uDE00y"]}', "wrong type", "key 'a' contains half of a surrogate pair"),
    ],
)
def test_bad_lines(line, fault, message):
    with pytest.raises(BadLine) as error:
        texts_of_line(line, ["a"])
    assert error.value.fault == fault
    assert error.value.message.startswith(message)
