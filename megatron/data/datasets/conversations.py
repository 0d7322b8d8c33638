"""Conversations of a file: OpenAI's messages, ShareGPT's and Alpaca's rows, in JSON lines or Parquet."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json

_SHARE_GPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
}
_ASSISTANT, _TOOL = "assistant", "tool"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}


class ConversationFile:
    """The rows of a file: lines of JSON, or the rows of a Parquet file (.parquet; needs the package pyarrow). Raises
    UserError, naming the file, if it cannot be read."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"--data-path {path}: {error.strerror}; --sft reads a .jsonl or .parquet file") from None
        self._is_parquet = self._content.startswith(b"PAR1")
        if not self._is_parquet and b"\0" in self._content[:4096]:
            raise UserError(f"{path}: neither lines of JSON nor Parquet; unpack the file if it is compressed")

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        lines = self._content if self._is_parquet else b"\n".join(self._content.splitlines())
        return hashlib.sha256(lines).hexdigest()

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """Yields the place of each row, for errors, and the row as JSON."""
        if self._is_parquet:
            for number, row in enumerate(self._parquet_rows(), 1):
                yield f"{self._path}: row {number}", json.dumps(_without_nulls(row), default=str).encode()
            return
        for number, line in enumerate(self._content.splitlines(), 1):
            if line.strip():
                yield f"{self._path}:{number}", line

    def _parquet_rows(self) -> Iterator[object]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(f"--data-path {self._path}: Parquet needs a package: pip install pyarrow") from None
        try:
            file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(self._content))
            for batch in file.iter_batches(1024):
                yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{self._path}: damaged, or no Parquet file: {' '.join(str(error).split())}") from None


def _without_nulls(value: object) -> object:
    """Leaves out fields that are null or NaN, with which Parquet and pandas fill up rows that have fewer fields than
    others."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None and entry == entry}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def parse_conversation(line: bytes) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Returns the turns of a conversation and the other fields of its row, which has one of these forms:

    - {"messages": [{"role": ..., "content": ...}, ...]}, as OpenAI's
    - {"conversations": [{"from": "human" or "gpt", "value": ...}, ...], "system": ...}, as ShareGPT's
    - {"instruction": ..., "input": ..., "output": ..., "system": ..., "history": [[..., ...], ...]}, as Alpaca's

    `tools` may be a list or its JSON. Raises UserError that names the field.
    """
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from None
    fields = dict(row) if isinstance(row, dict) else {"messages": row}
    if "messages" in fields:
        messages = fields.pop("messages")
    elif "conversations" in fields:
        messages = _of_share_gpt(fields)
    else:
        messages = _of_alpaca(fields) if {"instruction", "output"} <= fields.keys() else None
    if not isinstance(messages, list) or not messages:
        raise UserError(
            'expected {"messages": [{"role": ..., "content": ...}, ...]}, {"conversations": [{"from": ..., "value": '
            '...}, ...]} or {"instruction": ..., "output": ...}'
        )
    _check_characters(row)
    for number, turn in enumerate(messages, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str) or not turn.keys() - {"role"}:
            raise UserError('each turn needs a "role" and a "content"')
        try:
            _check_turn(turn)
        except UserError as error:
            raise UserError(f"turn {number}: {error}") from None
    if isinstance(fields.get("tools"), str):
        fields["tools"] = _json_of(fields["tools"], '"tools"') if fields["tools"].strip() else None
    return messages, fields


def _of_share_gpt(fields: dict[str, object]) -> object:
    turns = fields.pop("conversations")
    if not isinstance(turns, list):
        return None
    messages = _system(fields)
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or "from" not in turn:
            messages.append(turn)  # of OpenAI's form, or refused as such
            continue
        role, value = _SHARE_GPT_ROLES.get(str(turn["from"])), turn.get("value")
        if role is None:
            known = ", ".join(_SHARE_GPT_ROLES)
            raise UserError(f'turn {number}: "from" is {json.dumps(turn["from"])[:40]}; known are {known}')
        if turn["from"] == "function_call":
            what = f'turn {number}: the "value" of a function_call'
            call = _json_of(value, what) if isinstance(value, str) else value
            called = call if isinstance(call, list) else [call]
            if not all(isinstance(each, dict) for each in called):
                raise UserError(f"{what} is neither an object nor a list of objects")
            calls = [{"type": "function", "function": each} for each in called]
            messages.append({"role": role, "tool_calls": calls})
        else:
            messages.append({"role": role, "content": value})
    return messages


def _of_alpaca(fields: dict[str, object]) -> list[object]:
    messages, history = _system(fields), fields.pop("history", None) or []
    question, more, answer = fields.pop("instruction"), fields.pop("input", None), fields.pop("output")
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise UserError('"history" is not a list of pairs of question and answer')
    if more:
        for name, value in (("instruction", question), ("input", more)):
            if not isinstance(value, str):
                raise UserError(f'"{name}" is {_KINDS[type(value)]}; expected a text')
        question = f"{question}\n\n{more}"
    for asked, said in [*history, [question, answer]]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return messages


def _system(fields: dict[str, object]) -> list[object]:
    text = fields.pop("system", None)
    return [{"role": "system", "content": text}] if text else []


def _json_of(text: str, what: str) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{what} is not JSON: {error}") from None


def _check_characters(row: object) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise UserError(f"{half} is half of a surrogate pair, which is not a character") from None
    except RecursionError:
        raise UserError("not JSON: nested too deeply") from None


def _check_turn(turn: Mapping[str, object]) -> None:
    content, role = turn.get("content"), turn["role"]
    calls = turn.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UserError('"tool_calls" is not a list of objects')
    for name in _THOUGHTS:
        if not isinstance(turn.get(name), str | None):
            raise UserError(f'"{name}" is {_KINDS[type(turn[name])]}; expected a text')
    if content is None:
        if role != _ASSISTANT or not (calls or any(turn.get(name) for name in _THOUGHTS)):
            raise UserError('no "content", which only a turn of the assistant with "tool_calls" may leave out')
    elif isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise UserError('"content" has a part that is not {"type": "text", "text": "..."}')
    elif not isinstance(content, str) and not (isinstance(content, dict) and role == _TOOL):
        raise UserError(f'"content" is {_KINDS[type(content)]}; expected a text')
