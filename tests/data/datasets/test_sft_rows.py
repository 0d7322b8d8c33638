"""megatron/data/datasets/sft_rows.py: the turns and fields of a line; errors that name them."""

import json

import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.sft_rows import parse_conversation


def test_turns_without_a_text(tmp_path):
    part, calls = {"type": "text", "text": "1"}, [{"function": {"name": "f"}}]
    turns = [
        {"role": "user", "content": [part, part]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": {"value": 1}},
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "content": None, "reasoning_content": "1"},
    ]
    line = json.dumps({"messages": turns, "tools": None}).encode()
    assert parse_conversation(line) == (turns, {"tools": None})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('[{"role": 1, "content": "1"}]', 'each turn needs a "role" and a "content"'),
        ('[{"role": "user", "content": 1}]', 'turn 1: "content" is a number; expected a text'),
        ('[{"role": "user", "content": true}]', '"content" is a boolean; expected a text'),
        ('[{"role": "user", "content": {}}]', '"content" is an object; expected a text'),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "a part that is not"),
        ('[{"role": "user", "content": ["a"]}]', "a part that is not"),
        ('[{"role": "user", "content": [{"type": "text", "text": 1}]}]', "a part that is not"),
        ('[{"role": "user", "content": null}]', 'turn 1: no "content", which only a turn of the assistant'),
        ('[{"role": "assistant", "content": null, "tool_calls": []}]', 'no "content"'),
        ('[{"role": "assistant", "name": "x"}]', 'no "content"'),
        ('[{"role": "assistant", "content": "1", "tool_calls": "f()"}]', '"tool_calls" is not a list of objects'),
        ('[{"role": "assistant", "content": "1", "reasoning": 2}]', '"reasoning" is a number; expected a text'),
        (r'[{"role": "user", "content": "\ud800"}]', r"'\ud800' is half of a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "1"}], "tools": [{"\udc00": 1}]}', "half of a surrogate pair"),
        ('{"messages": ' + "[" * 20000 + "]" * 20000 + "}", "not JSON: nested too deeply"),
    ],
)
def test_mistakes_name_the_field(line, says):
    with pytest.raises(UserError) as error:
        parse_conversation(line.encode())
    assert says in str(error.value)
