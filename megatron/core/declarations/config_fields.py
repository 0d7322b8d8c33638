"""How a dataclass field declares a command-line flag.

A config dataclass is the only place where a flag is declared:

    @dataclass(kw_only=True)
    class ScheduleConfig:
        lr_decay_style: Literal["constant", "linear", "cosine"] = "linear"
        '''Shape of the learning rate after warm-up.'''

        check_for_nan_in_loss_and_grad: bool = flag(True, off="--no-check-for-nan-in-loss-and-grad")
        '''Look for non-finite losses and gradients.'''

The flag's name is the field's name. Its type, choices and number of words come from the annotation, and its help is the
string below the field. `flag` is needed only if Megatron-LM's command line differs from that rule; `not_a_flag` marks a
field without a flag.
"""

import ast
import dataclasses
import enum
import functools
import inspect
import math
import string
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.exceptions import UserError
from megatron.core.utils.url_keys import hide_keys

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_METADATA_KEY = "flag"


@dataclasses.dataclass(frozen=True)
class FlagDeclaration:
    """The properties of a field's flag that do not follow from name, annotation and docstring."""

    exposed: bool = True
    """False: the field has no flag."""
    on: str | None = None
    """Spelling of the flag, if it is not the field's name with dashes. For a bool: the flag that sets it to True."""
    off: str | None = None
    """For a bool: the flag that sets it to False."""
    off_help: str | None = None
    """Help of `off` where it is the field's only flag. None: the field's docstring with "do not" before its verb."""
    aliases: tuple[str, ...] = ()
    """Other spellings of the flag."""
    parse: Callable[[str], Any] | None = None
    """Converts one word of the command line to the value, if the annotation does not determine it. Raises
    ValueError."""
    nargs: str | int | None = None
    group: str | None = None
    """Help section, if it is not that of the dataclass."""
    supported: tuple[Any, ...] | None = None
    """The supported values; any other value is parsed and refused with "not yet: ...". None: all values are
    supported."""
    no_effect: str | None = None
    """The flag is accepted but has no effect; this sentence says why, and is printed if the flag is given."""
    only_with: tuple[str, ...] = ()
    """Conditions on other fields, which must all hold for this field to have an effect: "field" (not at its default),
    "field=value", "field=value|value" or "field!=value". `flag` also takes a single one. A note is printed if this
    field is given and one does not hold. A condition holds only if the field that it names has an effect itself."""
    or_with: tuple[str, ...] = ()
    """Conditions of which each gives this field an effect even if those of `only_with` do not hold."""
    families: tuple[str, ...] | None = None
    """The model families that read the flag ("gpt", "bert", "t5"); None: all. A note is printed if it is given in a run
    of another family."""
    gathers: bool = False
    """For a list: a repeated flag appends to it. Otherwise the last value counts."""
    hints: Mapping[str, str] | None = None
    """Words that people try as the value, and what to give instead; the error message for such a word quotes it."""
    words: Mapping[str, Any] | None = None
    """The words of the command line and their values, if the annotation is neither Literal nor Enum."""
    from_checkpoint: bool | None = None
    """Whether the value may be taken from a checkpoint, which anybody may have written. None: True, but False for free
    text, which may name code, or a file to write."""


_BY_THE_RULE = FlagDeclaration()


def flag(default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING, **declaration: Any) -> Any:
    """Returns a dataclass field whose flag needs more than the default rule. Keywords are those of
    `FlagDeclaration`."""
    for name in ("aliases", "supported", "families", "only_with", "or_with"):
        value = declaration.get(name)
        if isinstance(value, str):
            declaration[name] = (value,)
        elif isinstance(value, Sequence):
            declaration[name] = tuple(value)
    metadata = {_METADATA_KEY: FlagDeclaration(**declaration)}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def not_yet(
    default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING, **declaration: Any
) -> Any:
    """Returns a dataclass field whose feature is not supported yet: every value except the default is refused."""
    only = default if default_factory is dataclasses.MISSING else default_factory()
    return flag(default, default_factory=default_factory, supported=(only,), **declaration)


def not_a_flag(default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING) -> Any:
    """Returns a dataclass field without a flag."""
    return flag(default, default_factory=default_factory, exposed=False)


def split_condition(text: str) -> tuple[str, tuple[str, ...], bool]:
    """Returns the parts of a condition of `only_with`: the name of a field, values (none: any but its default), and
    whether these are the values that it must not have."""
    name, _, words = text.partition("=")
    return name.removesuffix("!"), tuple(words.split("|")) if words else (), name.endswith("!")


def declaration_of(field: "dataclasses.Field[Any]") -> FlagDeclaration:
    """Returns the declaration of a field; the default rule for a field that was written without `flag`."""
    return field.metadata.get(_METADATA_KEY, _BY_THE_RULE)


# ---------------------------------------------------------------------------------------------------------------------
# Problems: descriptions of wrong values
#
# A problem is a sentence in which `{field}` stands for a field and its value, and `{field:name}` for its name alone.
# The
# library spells fields as attributes, the command line spells them as flags.


def describe_problem(
    problem: str,
    config: object,
    spelling: Callable[[str], str] = str,
    text: Callable[[str, Any], str] = lambda field, value: value_text(value),
) -> str:
    """Returns the sentence with fields filled in; `config` has an attribute for each field named in it. `spelling`
    gives a field's name and `text` its value."""
    words = []
    for literal, field, spec, _ in string.Formatter().parse(problem):
        words.append(literal)
        if field is not None:
            value = getattr(config, field)
            alone = spec == "name" or isinstance(value, bool) or value is None
            words.append(spelling(field) if alone else f"{spelling(field)} {text(field, value)}")
    return "".join(words)


def too_small(config: object, names: Iterable[str], least: int) -> Iterator[str]:
    """Yields a problem for each of these fields that is not None and not a finite number of at least `least`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            yield f"{{{name}}} must be at least {least}"


def pattern_problems(config: object, name: str, chosen: str) -> Iterator[str]:
    """Yields a problem unless the field is None, a number of at least 1, or a list with a 0 or a 1 for each layer.
    `chosen` describes the layers with a 1, such as "with experts"."""
    pattern, layers = (getattr(config, field) for field in (name, "num_layers"))
    if pattern is None or isinstance(pattern, int):
        yield from too_small(config, (name,), 1)
        return
    if layers is not None and len(pattern) != layers:
        yield f"{{{name}:name}} has {len(pattern)} entries for {{num_layers:name}} {layers}; give one for each"
    if set(pattern) - {0, 1}:
        yield f"{{{name}}} has a 1 for a layer {chosen}, a 0 for any other, and nothing else"


def fields_of_problem(problem: str) -> set[str]:
    """Returns the names of the fields in a problem."""
    return {field for _, field, _, _ in string.Formatter().parse(problem) if field is not None}


def value_text(value: Any) -> str:
    """Returns a value as it is written on the command line, with hidden keys in URLs: for messages and records."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return " ".join(value_text(item) for item in value)
    return hide_keys(str(value).removeprefix("torch."))


def unsupported_values(
    config: "DataclassInstance", fields: Iterable["dataclasses.Field[Any]"] | None = None
) -> list[str]:
    """Returns a problem for each field with a value that is not supported yet."""
    problems = []
    for field in dataclasses.fields(config) if fields is None else fields:
        supported = declaration_of(field).supported
        if supported is not None and getattr(config, field.name) not in supported:
            works = " or ".join(value_text(value) for value in supported if value is not None and value is not False)
            hint = f"; what works so far is {works}" if works else ""
            problems.append(f"{{{field.name}}}: not yet{hint}")
    return problems


class FieldError(UserError):
    """A UserError about the values of a config's fields. Its message spells them as attributes; `text` as flags."""

    def __init__(self, problems: Sequence[str], config: object) -> None:
        self.problems, self.config = list(problems), config
        super().__init__(self.text(str))

    def text(self, spelling: Callable[[str], str]) -> str:
        """Returns the message with each field's name spelled by a function."""
        return hide_keys("; ".join(describe_problem(problem, self.config, spelling) for problem in self.problems))


def refuse(problems: Iterable[str], config: object) -> None:
    """Raises one FieldError with all problems, if there are any."""
    found = list(problems)
    if found:
        raise FieldError(found, config)


def literal_text(text: str) -> str:
    """Returns text escaped for a problem: it appears unchanged in the message, including braces."""
    return text.replace("{", "{{").replace("}", "}}")


# ---------------------------------------------------------------------------------------------------------------------
# Help


@functools.cache
def field_docstrings(config_class: type) -> dict[str, str]:
    """Returns the docstrings below the fields of a dataclass and its bases, by field name, with white space folded."""
    found: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[statement.target.id] = " ".join(str(below.value.value).split())
    return found
