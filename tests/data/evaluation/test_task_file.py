"""Task files and their documents: what is wrong is one sentence that names file, line and key."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.data.evaluation.requests import PreparedTask, prepare_task
from megatron.data.evaluation.task_file import read_tasks
from megatron.data.tokenizer.null import NullTokenizer

CLOZE = {"task": "cloze", "output_type": "loglikelihood", "data": "d.jsonl", "doc_to_text": "1", "doc_to_target": "a"}
WRITTEN = CLOZE | {"output_type": "generate_until"}
CHOICES = {
    "task": "mc",
    "output_type": "multiple_choice",
    "data": "d.jsonl",
    "doc_to_text": "q",
    "doc_to_target": "a",
    "doc_to_choice": "c",
}
LINES: list[Any] = [{"q": "5 6", "c": ["7", "8 9"], "a": 1}, {"q": "1", "c": ["2", "3"], "a": "2"}]


def prepared(folder: Path, task: Any, lines: list[Any] = LINES, max_length: int = 8) -> PreparedTask:
    (folder / "d.jsonl").write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    (folder / "t.json").write_text(task if isinstance(task, str) else json.dumps(task))
    return next(prepare_task(each, NullTokenizer(40), max_length) for each in read_tasks(folder / "t.json"))


@pytest.mark.parametrize(
    ("task", "lines", "words"),
    [
        ("", LINES, "t.json: holds no task; write a list of tasks"),
        ("[", LINES, "t.json:1: neither YAML nor JSON"),
        ([CLOZE | {"doc_to_txt": "1"}], LINES, "t.json: task 1 (cloze): unknown key 'doc_to_txt'; the keys are task, "),
        ([CLOZE | {"limit": "3"}], LINES, "t.json: task 1 (cloze): limit is '3'; it must be int or nothing"),
        ([CLOZE | {"output_type": "greedy"}], LINES, "output_type 'greedy' is not one of loglikelihood_rolling, "),
        ([CLOZE | {"data": "e.jsonl"}], LINES, "e.jsonl: no such file"),
        ("- {task: a, data: b,\n   task: c}", LINES, "t.json:2: task is in line 1 too; give one"),
        ([WRITTEN | {"generation_kwargs": {"until": ["1", ""]}}], LINES, "until is ['1', '']; it must be a text that"),
        ([WRITTEN | {"generation_kwargs": {"max_gen_toks": "2"}}], LINES, "max_gen_toks is '2'; it must be a whole"),
        ([CLOZE | {"doc_to_target": "b"}], LINES, "d.jsonl line 1: task cloze: the document has no field 'b'"),
        ([CLOZE | {"doc_to_target": "{{1 / 0}}"}], LINES, "d.jsonl line 1: task cloze: division by zero"),
        ([CHOICES | {"doc_to_choice": "{{c c}}"}], LINES, "d.jsonl line 1: task mc: chunk after expression"),
        ([CLOZE, CLOZE], LINES, "two tasks are named 'cloze'"),
        ([CLOZE | {"doc_to_choice": "c"}], LINES, "doc_to_choice belongs to output_type multiple_choice"),
        ([CLOZE], [], "d.jsonl: the file holds no document"),
        ([CLOZE], [LINES[0], "{"], "d.jsonl line 2: not JSON"),
        ([CLOZE | {"doc_to_target": "{{b}}"}], LINES, "d.jsonl line 1: task cloze: 'b' is undefined"),
        (
            [CHOICES],
            [*LINES, {"q": "1", "c": ["2", "3"], "a": 2}],
            "d.jsonl line 3: the label 2 is none of the 2 choices",
        ),
        ([CHOICES], [{"q": "1", "c": "2", "a": 0}], "line 1: doc_to_choice 'c' gives no list of two or more choices"),
        ([CHOICES], [{"q": "1 2 3 4 5 6 7 8", "c": ["2", "3"], "a": 0}], ""),
        (
            [CHOICES],
            [LINES[0], {"q": "1 2 3 4 5 6 7 8", "c": ["2", "3 4"], "a": 0}],
            "d.jsonl line 2: task mc asks about 9 tokens, but the model reads 8; shorten the document",
        ),
        ([CHOICES | {"num_fewshot": 2}], LINES, "d.jsonl: 2 documents are too few for num_fewshot 2"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, task: Any, lines: list[Any], words: str) -> None:
    if not words:
        prepared(tmp_path, task, lines)
        return
    with pytest.raises(UserError) as error:
        prepared(tmp_path, task, lines)
    assert words in str(error.value) and "\n" not in str(error.value)
