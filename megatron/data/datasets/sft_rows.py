"""A line of a file of conversations: its turns, and the other fields that a chat template may read."""

import json
from collections.abc import Mapping
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json

_ASSISTANT, _TOOL = "assistant", "tool"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}


def parse_conversation(line: bytes) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Returns the turns of a conversation and the other fields of its line. Raises UserError that names the field."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from None
    fields = dict(row) if isinstance(row, dict) else {"messages": row}
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise UserError('expected {"messages": [{"role": ..., "content": ...}, ...]}')
    _check_characters(row)
    for number, turn in enumerate(messages, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str) or not turn.keys() - {"role"}:
            raise UserError('each turn needs a "role" and a "content"')
        try:
            _check_turn(turn)
        except UserError as error:
            raise UserError(f"turn {number}: {error}") from None
    return messages, fields


def _check_characters(row: Any) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise UserError(f"{half} is half of a surrogate pair, which is not a character") from None
    except RecursionError:
        raise UserError("not JSON: nested too deeply") from None


def _check_turn(turn: Mapping[str, Any]) -> None:
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
