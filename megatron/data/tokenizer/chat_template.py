"""ChatTemplate: renders a conversation by a Jinja template, and records which part of the text each turn wrote."""

import itertools
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, UndefinedError, meta, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from megatron.core.exceptions import UserError

Span = tuple[int, int]
"""First character and end of a part of a text."""

_MAX_STEPS = 10_000_000
_MAX_SECONDS = 60.0
_MAX_LENGTH = 100_000_000
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a turn that hold its thoughts; a template reads one of them, and gets them under the first two names."""
_MARK, _STEP, _JOIN = "a mark", "a step", "the operator ~"
"""Filters for nodes that `_AddMarks` makes. Templates cannot spell these names."""
_OTHER_TEMPLATES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


@dataclass
class RenderedText:
    """The text of a conversation. `turns[i]` are the parts that the template wrote while its loop over the messages was
    at message i; `generated` are the parts inside of {% generation %}."""

    text: str
    turns: list[list[Span]]
    generated: list[Span] = field(default_factory=list)


class ChatTemplate:
    """A Jinja template for conversations, compiled as transformers compiles it, in Jinja's sandbox.

    Raises UserError for a template that is not Jinja or uses other templates. A rendering that takes more than a minute
    or ten million steps of loops ends with a UserError.
    """

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree)) - set(self._environment.globals)
            """Names that the template reads, without functions such as `range`."""
            for node in tree.find_all(_OTHER_TEMPLATES):
                raise UserError(f"line {node.lineno} of the chat template names another template; it must be one file")
            self.has_generation_tag = any(node.name == _MARK for node in tree.find_all(nodes.Filter))
            tree = _AddMarks().visit(tree).set_environment(self._environment)
            self._template = self._environment.template_class.from_code(
                self._environment, self._environment.compile(tree), self._environment.make_globals(None)
            )
        except UserError:
            raise
        except Exception as error:  # the compiler of Jinja or of Python
            raise UserError(f"the chat template is not a Jinja template: {error}") from None

    @property
    def writes_the_date(self) -> bool:
        """Whether a text so far has the day on which it was written."""
        return self._environment.wrote_date

    def render(self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]) -> str:
        """Returns the text of a conversation. Raises UserError if the template rejects it."""
        return self._render(messages, variables, "", "")

    def render_with_turns(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object], text: str
    ) -> RenderedText:
        """Returns `text`, which `render` returned for the same arguments, with the part of each turn."""
        private_use = map(chr, range(0xE000, 0xF000))
        opening, closing = itertools.islice((mark for mark in private_use if mark not in text), 2)
        marked = self._render(messages, variables, opening, closing)
        rendered = _read_marks(re.split(f"{opening}([^{closing}]*){closing}", marked), len(messages))
        if rendered.text != text:
            raise UserError(
                "the chat template edits the text that its loop over the messages has written, so the run cannot tell "
                "the turns apart; mark what the assistant writes by {% generation %} and {% endgeneration %} outside "
                "of such blocks"
            )
        return rendered

    def _render(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object], opening: str, closing: str
    ) -> str:
        plain = [_readable(message) for message in messages]
        self._environment.begin(plain, opening, closing)
        try:
            return self._template.render(**{"tools": None, "documents": None, **variables, "messages": plain})
        except TemplateError as error:
            bare = isinstance(error, UndefinedError) and "'content'" in str(error)
            hint = ", and a turn has none, or null; give it a text, such as an empty one" if bare else ""
            raise UserError(f"the chat template rejects the conversation: {error}{hint}") from None
        except UserError:
            raise
        except Exception as error:  # of the template's expressions
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UserError(f"the chat template fails on the conversation: {said}") from None


def _refuse_to_be_text(content: object) -> str:
    kind = "a list of parts" if isinstance(content, list) else "an object"
    raise TemplateError(f'it writes "content" as it is, and that of a turn is {kind}; put one text in its place')


class _Parts(list[Any]):
    """A list as content. A template that would write Python's notation of it is refused."""

    __str__ = __repr__ = _refuse_to_be_text


class _Record(dict[str, Any]):
    """An object as content. A template that would write Python's notation of it is refused."""

    __str__ = __repr__ = _refuse_to_be_text


def _readable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a turn as templates read it: without null fields; thoughts under both of their usual names."""
    plain = {key: value for key, value in message.items() if value is not None}
    thoughts = next((plain[key] for key in THOUGHTS if key in plain), None)
    if thoughts is not None:
        plain = {"thinking": thoughts, **plain, "reasoning_content": thoughts}
    if isinstance(plain.get("content"), (list, dict)):
        plain["content"] = (_Parts if isinstance(plain["content"], list) else _Record)(plain["content"])
    return plain


# ---------------------------------------------------------------------------------------------------------------------
# Marks: each loop whose variable is a message writes (loop, message) before its body, and (loop, end) after the loop


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, with the filters for the nodes that `_AddMarks` puts into a template."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self._now: datetime | None = None
        self.wrote_date = False
        self.globals |= {"raise_exception": _raise, "strftime_now": self._strftime}
        self.filters |= {"tojson": _to_json, _MARK: self._mark, _STEP: self._step, _JOIN: self._join}
        # A null content is left out, as in transformers; it is still "none" for templates that ask.
        self.tests["none"] = lambda value: (
            value is None or (isinstance(value, Undefined) and value._undefined_name == "content")
        )
        self.begin([], "", "")

    def begin(self, messages: Sequence[Any], opening: str, closing: str) -> None:
        """Prepares a rendering that writes marks between two characters, or none if these are empty."""
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._opening, self._closing = opening, closing
        self._found: dict[int, bool] = {}
        self._steps = 0
        self._end = time.monotonic() + _MAX_SECONDS

    @pass_context  # as all of these, so that Jinja does not compute the result when it compiles
    def _mark(self, context: object, value: object, kind: str, loop: int) -> str:
        """Returns the mark of an event: a loop takes its next `value` ("next"), sets a variable to it ("set") or ends
        ("end"); a part that is learned begins or ends ("[", "]")."""
        self._count_step()
        number = self._numbers.get(id(value))
        if kind in ("next", "set"):
            found = self._found.get(loop, False)
            if kind == "set" and (found or number is None):  # the loop is at a message and looks at another one
                return ""
            self._found[loop] = number is not None
            if number is None and not found:
                return ""
        if not self._opening:
            return ""
        return f"{self._opening}{kind} {loop} {number}{self._closing}"

    @pass_context
    def _step(self, context: object, value: object) -> str:
        self._count_step()
        return ""

    def _count_step(self) -> None:
        """Counts a step of a loop or a macro. Raises TemplateError beyond the limits."""
        self._steps += 1
        if self._steps > _MAX_STEPS or time.monotonic() > self._end:
            raise TemplateError("its loops do not end: it takes more than ten million steps, or a minute")

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # type: ignore[override]  # of the pieces that a template writes
        """Returns the joined texts. Raises TemplateError if they are too long."""
        kept, length = [], 0
        for piece in pieces:
            kept.append(piece)
            length += len(piece)
            _check_length(length)
        return "".join(kept)

    @pass_context
    def _join(self, context: object, values: Sequence[object]) -> str:
        return self.concat(map(str, values))

    def call_binop(self, context: Any, operator: str, left: object, right: Any) -> object:
        """Computes an operation whose result may be huge."""
        if operator == "**" and isinstance(right, (int, float)) and abs(right) > 100:
            raise TemplateError("it computes a power above 100")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                    _check_length(len(one) * other)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (str, list, tuple)):
            _check_length(len(result))
        elif isinstance(result, int) and result.bit_length() > 10_000:
            raise TemplateError("it computes a huge number")
        return result

    def _strftime(self, form: str) -> str:
        self.wrote_date = True
        self._now = self._now or datetime.now()
        return self._now.strftime(form)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (_call(_MARK, line, nodes.Const(None), nodes.Const(kind), nodes.Const(0)) for kind in "[]")
        return nodes.Scope([begin, *body, end]).set_lineno(line)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_length(length: int) -> None:
    if length > _MAX_LENGTH:
        raise TemplateError(f"it makes a text or list of {length} entries; {_MAX_LENGTH} are allowed")


class _AddMarks(NodeTransformer):
    """Puts marks into loops, and counts of steps into macros. Joins (~) become calls of the environment."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._loop = 0  # around the node; 0 outside of loops

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        outer, self._loop = self._loop, next(self._numbers)
        number = nodes.Const(self._loop)
        self.generic_visit(node)
        self._loop = outer
        nothing = nodes.Const(None)
        target = nodes.Name(node.target.name, "load") if isinstance(node.target, nodes.Name) else nothing
        node.body.insert(0, _call(_MARK, node.lineno, target, nodes.Const("next"), number))
        return [node, _call(_MARK, node.lineno, nothing, nodes.Const("end"), number)]

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node | list[nodes.Node]:
        self.generic_visit(node)
        if not self._loop or not isinstance(node.target, nodes.Name):
            return node
        value = nodes.Name(node.target.name, "load")
        return [node, _call(_MARK, node.lineno, value, nodes.Const("set"), nodes.Const(self._loop))]

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        outer, self._loop = self._loop, 0
        self.generic_visit(node)
        self._loop = outer
        node.body.insert(0, _call(_STEP, node.lineno, nodes.Const(None)))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _called(_JOIN, nodes.List(node.nodes)).set_lineno(node.lineno)


def _called(method: str, value: nodes.Expr, *arguments: nodes.Expr) -> nodes.Filter:
    """Returns the call of a method of the environment. Jinja calls filters much faster than functions."""
    return nodes.Filter(value, method, list(arguments), [], None, None)


def _call(method: str, line: int, value: nodes.Expr, *arguments: nodes.Expr) -> nodes.Output:
    """Returns a statement that writes the result of a method of the environment."""
    node = nodes.Output([_called(method, value, *arguments)])
    node.set_lineno(line)
    return node


def _read_marks(pieces: Sequence[str], count: int) -> RenderedText:
    """Returns the text, and the parts of `count` turns, of pieces that are text and marks by turns."""
    rendered = RenderedText("".join(pieces[::2]), [[] for _ in range(count)])
    loops: list[tuple[str, int]] = []  # loops around the place that are at a message, and the message
    begins: list[int] = []  # of parts that are learned
    at = 0
    for text, mark in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        if text and loops:
            spans = rendered.turns[loops[-1][1]]
            begin = spans.pop()[0] if spans and spans[-1][1] == at else at
            spans.append((begin, at + len(text)))
        at += len(text)
        kind, loop, number = mark.split(" ") if mark else ("", "", "")
        if kind == "[":
            begins.append(at)
        elif kind == "]":
            rendered.generated.append((begins.pop(), at))
        elif kind:
            known = [name for name, _ in loops]
            if loop in known:
                del loops[known.index(loop) :]
            if number != "None":
                loops.append((loop, int(number)))
    return rendered
