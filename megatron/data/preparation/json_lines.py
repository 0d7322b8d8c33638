"""Parses a line of the input into its texts."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

Fault = Literal["too long", "not UTF-8", "not JSON", "missing key", "wrong type", "not encodable"]


class BadLine(Exception):
    """A line that cannot be used. `fault` is the kind of fault, `message` describes it."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault
        self.message = message


def texts_of_line(line: bytes, keys: Sequence[str], split: Callable[[str], list[str]] | None = None) -> list[list[str]]:
    """Returns the texts of each key of the line's JSON object. `split` divides a text into sentences; the texts of a
    list stay as they are. Raises BadLine."""
    record = _parse(line)
    if not isinstance(record, dict):
        raise BadLine("wrong type", f"{_kind(record)}, not an object with the key {keys[0]!r}")
    escapes = b"\\u" in line
    texts = []
    for key in keys:
        value = record.get(key)
        found = [value] if isinstance(value, str) and not escapes else _checked_texts(record, key, escapes)
        texts.append(split(value) if split is not None and isinstance(value, str) else found)
    return texts


def _parse(line: bytes) -> Any:
    try:
        text = line.decode()
        try:
            record, end = _scan(text, 0)
            if text[end:].isspace():
                return record
        except StopIteration:
            pass
        return json.loads(text)  # slower, but allows blanks around the object and describes errors
    except UnicodeDecodeError as error:
        raise BadLine("not UTF-8", f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        message = error.msg.removesuffix(" at")  # a message about control characters ends so
        raise BadLine("not JSON", f"not JSON: {message} at column {error.colno}") from None
    except RecursionError:
        raise BadLine("not JSON", "not JSON: nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadLine("not JSON", f"not JSON that can be read: {error}") from None


def _checked_texts(record: dict[str, Any], key: str, may_hold_escapes: bool) -> list[str]:
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
            _refuse(key, "half of a surrogate pair, which is not a character")
    return texts


def _refuse(key: str, what: str) -> NoReturn:
    raise BadLine("wrong type", f"key {key!r} contains {what}")


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
