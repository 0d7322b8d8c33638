"""A line of the input: the texts it holds, or what is wrong with it."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

Fault = Literal["too long", "not UTF-8", "not JSON", "missing key", "wrong type", "not encodable"]


class BadLine(Exception):
    """A line that is not what it must be."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault
        self.message = message


def texts_of_line(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    """For each key the texts that the line's object has there. Raises BadLine."""
    record = _parse(line)
    if not isinstance(record, dict):
        raise BadLine("wrong type", f"{_kind(record)}, not an object with the key {keys[0]!r}")
    return [_texts(record, key, may_hold_escapes=b"\\u" in line) for key in keys]


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadLine("not UTF-8", f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise BadLine("not JSON", f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadLine("not JSON", "not JSON: nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadLine("not JSON", f"not JSON that can be read: {error}") from None


def _texts(record: dict[str, Any], key: str, may_hold_escapes: bool) -> list[str]:
    if key not in record:
        present = ", ".join(repr(name) for name in record) or "none"
        raise BadLine("missing key", f"no key {key!r}; keys present: {present}")
    value = record[key]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        _refuse(key, f"{_kind(value)}, not a text or a list of texts")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            _refuse(key, f"a list whose element {number} is {_kind(text)}, not a text")
        if may_hold_escapes and _holds_half_a_pair(text):
            _refuse(key, "half of a surrogate pair, which is no character")
    return texts


def _refuse(key: str, what: str) -> NoReturn:
    raise BadLine("wrong type", f"key {key!r} holds {what}")


def _holds_half_a_pair(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return "a text"
        case list():
            return "a list"
        case _:
            return "an object"
