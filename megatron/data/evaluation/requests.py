"""From tasks and documents to the rows of tokens that a model must score or continue."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.exceptions import UserError
from megatron.data.evaluation.task_file import Document, EvaluationTask, read_documents
from megatron.data.tokenizer.base import Tokenizer

_EXPRESSION = re.compile(r"\s*\{\{(.*)\}\}\s*", re.S)


@dataclass(frozen=True)
class Row:
    """Tokens of a context, followed by `scored` tokens whose probability is asked; 0: a prompt to continue."""

    ids: tuple[int, ...]
    scored: int = 0


@dataclass(frozen=True)
class Question:
    """The rows of one document, and its right answer."""

    rows: tuple[Row, ...]
    """One for each choice, or one for each window of a long text; otherwise one."""
    answer: int | str | None = None
    """The number of the right choice; the text to write; None for perplexity and cloze."""
    num_bytes: tuple[int, ...] = ()
    """UTF-8 bytes of each choice, or of the whole text."""
    num_words: int = 0
    """Words of the whole text, between blanks."""


@dataclass(frozen=True)
class PreparedTask:
    """A task and the questions of its documents."""

    task: EvaluationTask
    questions: tuple[Question, ...]


def prepare_task(task: EvaluationTask, tokenizer: Tokenizer, max_length: int) -> PreparedTask:
    """Returns the questions of a task for a model that reads at most `max_length` tokens. Raises UserError, naming file
    and line, for a document that lacks a field, a label outside the choices, and a row that is too long."""
    writer = _Writer(task, tokenizer, max_length)
    documents = read_documents(task.data, task.limit)
    return PreparedTask(task, tuple(writer.question(number, document) for number, document in enumerate(documents)))


class _Writer:
    def __init__(self, task: EvaluationTask, tokenizer: Tokenizer, max_length: int) -> None:
        from jinja2 import StrictUndefined  # torch needs the package, too
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.task, self.tokenizer, self.max_length = task, tokenizer, max_length
        self.environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        self.prefix = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
        self.examples: list[Document] = []
        if task.num_fewshot:
            self.examples = read_documents(task.fewshot_data or task.data, task.num_fewshot + 1)
        needed = task.num_fewshot + (task.fewshot_data is None)
        if len(self.examples) < (needed if task.num_fewshot else 0):
            where = task.fewshot_data or task.data
            raise UserError(f"{where}: {len(self.examples)} documents are too few for num_fewshot {task.num_fewshot}")

    def question(self, number: int, document: Document) -> Question:
        """Returns the question of a document, number `number` of its file."""
        task = self.task
        if task.output_type == "loglikelihood_rolling":
            return self._whole_text(document)
        prompt = task.description + "".join(self._examples_for(number)) + self._text(task.doc_to_text, document)
        if task.output_type == "generate_until":
            ids = tuple(self._encode(prompt, document)) or (self.prefix,)
            self._check(len(ids) + task.max_gen_toks, document, f" with {task.max_gen_toks} new ones (max_gen_toks)")
            return Question((Row(ids),), self._text(task.doc_to_target, document))
        if task.output_type == "loglikelihood":
            return Question((self._pair(prompt, self._text(task.doc_to_target, document), document),))
        choices = self._choices(document)
        rows = tuple(self._pair(prompt, task.target_delimiter + choice, document) for choice in choices)
        sizes = tuple(len(choice.encode()) for choice in choices)
        return Question(rows, self._label(document, choices), sizes)

    def _examples_for(self, number: int) -> Iterator[str]:
        task = self.task
        is_same_file = task.fewshot_data in (None, task.data)
        others = [example for place, example in enumerate(self.examples) if not (is_same_file and place == number)]
        for example in others[: task.num_fewshot]:
            if task.doc_to_choice is None:
                answer = self._text(task.doc_to_target, example)
            else:
                choices = self._choices(example)
                answer = choices[self._label(example, choices)]
            yield self._text(task.doc_to_text, example) + task.target_delimiter + answer + task.fewshot_delimiter

    # Text ------------------------------------------------------------------------------------------------------------

    def _value(self, template: str, document: Document) -> Any:
        """Returns the field of this name, or the text of the template."""
        if template in document.fields:
            return document.fields[template]
        return self._evaluate(lambda: self.environment.from_string(template).render(document.fields), document)

    def _text(self, template: str, document: Document) -> str:
        """Returns a prompt or an answer. Raises UserError for a single word that is no field of the document."""
        if template.isidentifier() and template not in document.fields:
            raise UserError(f"{document.place}: task {self.task.task}: the document has no field {template!r}")
        return str(self._value(template, document))

    def _evaluate(self, action: Any, document: Document) -> Any:
        from jinja2 import TemplateError

        try:
            return action()
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UserError(f"{document.place}: task {self.task.task}: {error}") from error

    def _choices(self, document: Document) -> list[str]:
        wanted = self.task.doc_to_choice
        assert wanted is not None
        if isinstance(wanted, list):
            return [str(self._value(template, document)) for template in wanted]
        expression = _EXPRESSION.fullmatch(wanted)
        if wanted in document.fields or expression is None:
            found = document.fields.get(wanted)
        else:
            source = expression[1]
            found = self._evaluate(
                lambda: self.environment.compile_expression(source, undefined_to_none=False)(document.fields), document
            )
        if not isinstance(found, list) or len(found) < 2:
            raise UserError(f"{document.place}: doc_to_choice {wanted!r} gives no list of two or more choices")
        return [str(choice) for choice in found]

    def _label(self, document: Document, choices: Sequence[str]) -> int:
        """Returns the number of the right choice."""
        target = self.task.doc_to_target
        label = self._value(target, document)
        if isinstance(label, str) and target not in document.fields and label.strip().isdigit():
            label = int(label)
        if isinstance(label, str) and label in choices:
            return choices.index(label)
        if isinstance(label, int) and 0 <= label < len(choices):
            return int(label)
        raise UserError(
            f"{document.place}: the label {label!r} is none of the {len(choices)} choices; give a text among them or a "
            f"number from 0 to {len(choices) - 1}"
        )

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _encode(self, text: str, document: Document) -> list[int]:
        try:
            return self.tokenizer.tokenize(text)
        except UserError as error:
            raise UserError(f"{document.place}: {error}") from error

    def _pair(self, context: str, continuation: str, document: Document) -> Row:
        """Returns the row of a context and its continuation. Blanks between the two belong to the continuation, as in
        the words of most tokenizers."""
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        before = self._encode(context, document) if context else []
        ids = self._encode(context + continuation, document)
        if not before:
            before, ids = [self.prefix], ids if ids[:1] == [self.prefix] else [self.prefix, *ids]
        if len(ids) <= len(before):
            raise UserError(f"{document.place}: the continuation {continuation!r} has no token of its own")
        self._check(len(ids) - 1, document)
        return Row(tuple(ids), len(ids) - len(before))

    def _whole_text(self, document: Document) -> Question:
        """Returns windows that score each token once, with as many tokens before it as fit."""
        text, longest = self._text(self.task.doc_to_target, document), self.max_length
        ids = self._encode(text, document)
        ids = ids if ids[:1] == [self.prefix] else [self.prefix, *ids]
        if len(ids) < 2:
            raise UserError(f"{document.place}: the text is empty")
        rows = []
        for begin in range(1, len(ids), longest):
            end = min(begin + longest, len(ids))
            rows.append(Row(tuple(ids[max(0, end - longest - 1) : end]), end - begin))
        return Question(tuple(rows), None, (len(text.encode()),), len(re.split(r"\s+", text)))

    def _check(self, tokens: int, document: Document, more: str = "") -> None:
        if tokens > self.max_length:
            remedy = ", or lower num_fewshot" if self.task.num_fewshot else ""
            raise UserError(
                f"{document.place}: task {self.task.task} asks about {tokens} tokens{more}, but the model reads "
                f"{self.max_length}; shorten the document{remedy}"
            )
