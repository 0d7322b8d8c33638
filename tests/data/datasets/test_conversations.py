"""megatron/data/datasets/conversations.py: rows of several forms are the same conversation."""

import gzip
import json
import math

import pyarrow
import pyarrow.parquet
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.conversations import ConversationFile, parse_conversation

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2."},
]
SHARE_GPT = [
    {"from": "human", "value": "1 + 1?"},
    {"from": "function_call", "value": json.dumps(CALL["function"])},
    {"from": "observation", "value": "2"},
    {"from": "gpt", "value": "2."},
]


def parsed(row):
    return parse_conversation(json.dumps(row).encode())


def test_openai_and_share_gpt_with_tools_are_the_same():
    expected = (MESSAGES, {"tools": [TOOL], "id": 7})
    assert parsed({"messages": MESSAGES, "tools": [TOOL], "id": 7}) == expected
    row = {"conversations": SHARE_GPT, "system": "Be short.", "tools": json.dumps([TOOL]), "id": 7}
    assert parsed(row) == expected
    assert parsed({"conversations": MESSAGES}) == (MESSAGES, {})
    calls = [{"conversations": [{"from": "function_call", "value": call}]} for call in ({"name": "f"}, '{"name": "f"}')]
    assert parsed(calls[0]) == parsed(calls[1])


def test_alpaca():
    row = {"instruction": "Add.", "input": "1, 1", "output": "2", "history": [["Hi", "Hello"]], "system": "Be short."}
    contents = [("system", "Be short."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Add.\n\n1, 1")]
    expected = [{"role": role, "content": content} for role, content in [*contents, ("assistant", "2")]]
    assert parsed(row) == (expected, {})
    assert parsed({"instruction": "Add.", "input": "", "output": "2"})[0][0] == {"role": "user", "content": "Add."}


def test_parquet_rows_are_those_of_json_lines(tmp_path):
    short = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": MESSAGES, "tools": [TOOL]}, {"messages": short}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    table = pyarrow.Table.from_pylist([row | {"score": math.nan} for row in rows])  # as pandas writes missing numbers
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    files = [ConversationFile(str(tmp_path / f"a.{kind}")) for kind in ("jsonl", "parquet")]
    lines, columns = ([parse_conversation(row) for _, row in file] for file in files)
    assert lines == columns == [(MESSAGES, {"tools": [TOOL]}), (short, {})]
    assert [place.rsplit("/", 1)[1] for file in files for place, _ in file] == [
        "a.jsonl:1",
        "a.jsonl:3",
        "a.parquet: row 1",
        "a.parquet: row 2",
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a"}, 'expected {"messages": '),
        ({"conversations": [{"from": "robot", "value": "a"}]}, 'turn 1: "from" is "robot"; known are human, user, gpt'),
        ({"conversations": [{"from": "gpt", "value": 7}]}, 'turn 1: "content" is a number; expected a text'),
        (
            {"conversations": [{"from": "function_call", "value": "{"}]},
            'turn 1: the "value" of a function_call',
        ),
        (
            {"conversations": [{"from": "function_call", "value": "[3]"}]},
            'turn 1: the "value" of a function_call is neither',
        ),
        ({"conversations": 7}, "expected "),
        ({"instruction": "a", "input": 3, "output": "b"}, '"input" is a number; expected a text'),
        ({"instruction": "a", "output": None}, 'turn 2: no "content"'),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, '"history" is not a list of pairs'),
        ({"messages": MESSAGES, "tools": "[{"}, '"tools" is not JSON'),
    ],
)
def test_bad_rows_are_named(row, says):
    with pytest.raises(UserError) as error:
        parsed(row)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_bad_files_are_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"a.parquet: damaged, or no Parquet file"):
        list(ConversationFile(str(tmp_path / "a.parquet")))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"messages": []}'))
    with pytest.raises(UserError, match=r"a.jsonl.gz: neither lines of JSON nor Parquet; unpack"):
        ConversationFile(str(tmp_path / "a.jsonl.gz"))
    with pytest.raises(UserError, match=r"--data-path .*none: No such file.* a .jsonl or .parquet file"):
        ConversationFile(str(tmp_path / "none"))
