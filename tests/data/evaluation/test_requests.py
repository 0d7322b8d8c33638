"""Rows of tokens: examples before prompts, choices, windows of long texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.data.evaluation.requests import PreparedTask, prepare_task
from megatron.data.evaluation.task_file import read_tasks
from megatron.data.tokenizer.null import NullTokenizer

CHOICES = {
    "task": "mc",
    "output_type": "multiple_choice",
    "data": "d.jsonl",
    "doc_to_text": "q",
    "doc_to_target": "a",
    "doc_to_choice": "c",
}
LINES: list[Any] = [{"q": "5 6", "c": ["7", "8 9"], "a": 1}, {"q": "1", "c": ["2", "3"], "a": "2"}]


def prepared(folder: Path, task: dict[str, Any], lines: list[Any] = LINES, max_length: int = 8) -> PreparedTask:
    (folder / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "t.json").write_text(json.dumps(task))
    return prepare_task(read_tasks(folder / "t.json")[0], NullTokenizer(40), max_length)


def test_examples_are_the_first_other_documents_with_their_answers(tmp_path: Path) -> None:
    first, second = prepared(tmp_path, CHOICES | {"num_fewshot": 1, "fewshot_delimiter": " 0 "}).questions
    assert [row.ids for row in first.rows] == [(1, 2, 0, 5, 6, 7), (1, 2, 0, 5, 6, 8, 9)]
    assert [row.scored for row in first.rows] == [1, 2]
    assert [row.ids for row in second.rows] == [(5, 6, 8, 9, 0, 1, 2), (5, 6, 8, 9, 0, 1, 3)]
    assert (first.answer, second.answer, first.num_bytes) == (1, 0, (1, 3))


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 20])
def test_windows_score_each_token_once_with_all_the_context_that_fits(tmp_path: Path, length: int) -> None:
    text = " ".join(str(number) for number in range(1, length + 1))
    task = {"task": "t", "output_type": "loglikelihood_rolling", "data": "d.jsonl"}
    (question,) = prepared(tmp_path, task, [{"text": text}], max_length=4).questions
    ids = [40, *range(1, length + 1)]  # the first token follows the end of a document
    assert [token for row in question.rows for token in row.ids[-row.scored :]] == ids[1:]
    for row in question.rows:
        assert len(row.ids) == min(5, row.ids[-1] + 1) and list(row.ids) == ids[row.ids[-1] + 1 - len(row.ids) :][:5]
