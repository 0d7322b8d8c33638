"""The file of --eval-tasks: a list of tasks in YAML or JSON, with the keys of lm-evaluation-harness.

    - task: capitals
      output_type: multiple_choice
      data: capitals.jsonl
      doc_to_text: "Question: {{question}}\\nAnswer:"
      doc_to_choice: ["{{a}}", "{{b}}"]
      doc_to_target: label

Text is a Jinja template over the fields of a document, or the name of a field.
"""

import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from megatron.core.exceptions import UserError
from megatron.core.utils.yaml_files import read_yaml

OUTPUT_TYPES = ("loglikelihood_rolling", "multiple_choice", "loglikelihood", "generate_until")
"""Perplexity of whole texts; the likeliest of several choices; a cloze, whose missing end is scored; the text that the
model writes."""


@dataclass(frozen=True)
class EvaluationTask:
    """One task. The fields are the keys of the file, and those of lm-evaluation-harness except for `data`,
    `fewshot_data` and `limit`."""

    task: str
    """Name in the log."""
    output_type: str
    """One of `OUTPUT_TYPES`."""
    data: str
    """JSONL file of documents, relative to the folder of the task file."""
    doc_to_text: str = ""
    """The prompt of a document."""
    doc_to_target: str = "text"
    """The answer: a text, or for multiple choice the number or the text of the right choice. For perplexity the
    text."""
    doc_to_choice: str | list[str] | None = None
    """The choices of a document: the name of a field that holds a list, an expression `{{...}}` for a list, or a
    template for each choice."""
    description: str = ""
    """Text before the examples and the prompt."""
    target_delimiter: str = " "
    """Text between a prompt and its answer, in examples and before choices. A cloze brings its own blank."""
    fewshot_delimiter: str = "\n\n"
    """Text after each example."""
    num_fewshot: int = 0
    """Number of examples with answers before the prompt: the first documents of `fewshot_data` other than the document
    itself."""
    fewshot_data: str | None = None
    """JSONL file of the examples. Default: `data`."""
    generation_kwargs: dict[str, Any] = field(default_factory=dict)
    """For generate_until: `until`, texts that end the answer (default: `fewshot_delimiter`), and `max_gen_toks`."""
    limit: int | None = None
    """Evaluate only so many documents, from the first."""

    @property
    def until(self) -> tuple[str, ...]:
        """Texts that end a generated answer."""
        given = self.generation_kwargs.get("until", self.fewshot_delimiter)
        return tuple(filter(None, [given] if isinstance(given, str) else given))

    @property
    def max_gen_toks(self) -> int:
        """Largest number of tokens of a generated answer."""
        return self.generation_kwargs.get("max_gen_toks", 256)


@dataclass(frozen=True)
class Document:
    """One line of a JSONL file."""

    fields: Mapping[str, Any]
    place: str
    """File and line, for messages."""


def read_tasks(path: str | Path) -> list[EvaluationTask]:
    """Returns the tasks of a file, whose data files exist. Raises UserError, naming file, task and key."""
    path = Path(path)
    entries = _read_entries(path)
    tasks = [_task(entry, f"{path}: task {number}", path.parent) for number, entry in enumerate(entries, 1)]
    names = [task.task for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: two tasks are named {name!r}; the log needs different names")
    return tasks


def read_documents(path: str | Path, limit: int | None = None) -> list[Document]:
    """Returns the objects of a JSONL file; at most `limit`. Raises UserError, naming file and line, for a file that has
    none or cannot be read."""
    documents: list[Document] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(documents) == limit:
                    break
                if line.strip():
                    documents.append(Document(_object(line, f"{path} line {number}"), f"{path} line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not documents:
        raise UserError(f"{path}: the file holds no document; write one JSON object on each line")
    return documents


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{place}: {type(found).__name__} instead of a JSON object")
    return found


def _read_entries(path: Path) -> list[Any]:
    content = read_yaml(path)
    entries = [content] if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: holds no task; write a list of tasks, each with task, output_type and data")
    return entries


def _task(entry: Any, place: str, folder: Path) -> EvaluationTask:
    if not isinstance(entry, dict):
        raise UserError(f"{place}: {entry!r} is not a mapping of keys to values")
    place = f"{place} ({entry['task']})" if isinstance(entry.get("task"), str) else place
    hints = get_type_hints(EvaluationTask)
    for key, value in entry.items():
        if key not in hints:
            raise UserError(f"{place}: unknown key {key!r}; the keys are {', '.join(hints)}")
        _check_type(f"{place}: {key}", value, hints[key])
    missing = [key for key in ("task", "output_type", "data") if not entry.get(key)]
    if missing:
        raise UserError(f"{place}: {missing[0]} is missing")
    paths = {key: str(folder / entry[key]) for key in ("data", "fewshot_data") if entry.get(key)}
    task = EvaluationTask(**{**entry, **paths})
    _check_values(task, place)
    for name in paths.values():
        if not Path(name).is_file():
            raise UserError(f"{place}: {name}: no such file")
    return task


def _check_type(place: str, value: Any, hint: Any) -> None:
    kinds = typing.get_args(hint) if typing.get_args(hint) and not hasattr(hint, "__origin__") else (hint,)
    plain = tuple(getattr(kind, "__origin__", kind) for kind in kinds)
    if not isinstance(value, plain) or isinstance(value, bool):
        names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in plain)
        raise UserError(f"{place} is {value!r}; it must be {names}")


def _check_values(task: EvaluationTask, place: str) -> None:
    if task.output_type not in OUTPUT_TYPES:
        raise UserError(f"{place}: output_type {task.output_type!r} is not one of {', '.join(OUTPUT_TYPES)}")
    if (task.doc_to_choice is not None) != (task.output_type == "multiple_choice"):
        raise UserError(f"{place}: doc_to_choice belongs to output_type multiple_choice, which needs it")
    for key in ("num_fewshot", "limit"):
        value = getattr(task, key)
        if value is not None and value < (key == "limit"):
            raise UserError(f"{place}: {key} {value} must be at least {int(key == 'limit')}")
    unknown = task.generation_kwargs.keys() - {"until", "max_gen_toks"}
    if unknown:
        raise UserError(f"{place}: generation_kwargs has the unknown key {min(unknown)!r}; until, max_gen_toks work")
    if task.generation_kwargs and task.output_type != "generate_until":
        raise UserError(f"{place}: generation_kwargs belongs to output_type generate_until")
    given = task.generation_kwargs.get("until", [])
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise UserError(f"{place}: until is {given!r}; it must be a text that is not empty, or a list of such texts")
    longest = task.generation_kwargs.get("max_gen_toks", 1)
    if type(longest) is not int or longest < 1:
        raise UserError(f"{place}: max_gen_toks is {longest!r}; it must be a whole number, 1 or more")
    if task.num_fewshot and task.output_type == "loglikelihood_rolling":
        raise UserError(f"{place}: num_fewshot has no place in whole texts; leave it out")
