"""Reads pickles without running anything.

A stack machine executes the opcodes on plain data. A name of a class or function becomes an `Inert` record, which is
never looked up, imported or called. So the content of a pickle can be examined, and no pickle can run code.
"""

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.core.exceptions import UserError

MAX_PICKLE_BYTES = 1 << 30
"""Size of the largest pickle that is read; larger ones are refused."""

KNOWN_PACKAGES = frozenset(
    "torch numpy collections argparse enum pathlib builtins copyreg datetime signal types functools"  # noqa: SIM905
    " _codecs megatron transformer_engine apex nvidia_resiliency_ext omegaconf".split()
)
"""First parts of the module names that Megatron-LM's checkpoints may contain. Nothing of them is imported."""

_HARMLESS_BUILTINS = frozenset(
    "object dict list tuple set frozenset int float complex str bytes bytearray bool slice range".split()  # noqa: SIM905
)
_OLD_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Names of Python 2, which pickles up to protocol 2 have."""
_MAX_KEY_LENGTH = 16
_MAX_DIMS = 64


class UnreadablePickle(UserError):
    """A pickle is damaged, or contains what no checkpoint does."""


@dataclass(frozen=True)
class Name:
    """The name of a class or function in a pickle."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Inert:
    """An object of a pickle as a record: the function that would have made it, and the content that it would have
    got."""

    made_by: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    """Elements of a list or set; pairs of a mapping."""

    def attribute(self, name: str) -> Any:
        """Returns an attribute from the object's state. Raises UnreadablePickle if there is none."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise UnreadablePickle(f"a {self.made_by} has no {name}")
        return self.state[name]


@dataclass(frozen=True)
class Storage:
    """A persistent id of torch: the memory of tensors, in another entry of the archive."""

    kind: str
    """torch's name of the type, such as FloatStorage."""
    key: str
    numel: int


Construct = Callable[[tuple[Any, ...]], Any]


def read_pickle(content: bytes, source: str, constructors: dict[str, Construct] | None = None) -> object:
    """Returns the value of a pickle as plain data, with `Inert` records for objects.

    `constructors` turns the arguments of some functions (`module.name`) into values. `source` names the file in errors.
    Raises UnreadablePickle for damaged pickles, for names outside `KNOWN_PACKAGES`, and for opcodes that checkpoints do
    not need.
    """
    if len(content) > MAX_PICKLE_BYTES:
        raise UnreadablePickle(f"{source}: a pickle of {len(content)} bytes; at most {MAX_PICKLE_BYTES} are read")
    machine = _Machine(constructors or {}, len(content))
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
            machine.execute(opcode.name, argument)
            if opcode.name == "STOP":
                return machine.pop()
    except UserError as error:
        raise UnreadablePickle(f"{source}: {error}; nothing of it was executed") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise UnreadablePickle(f"{source}: not a pickle of a checkpoint ({type(error).__name__}: {error})") from None
    raise UnreadablePickle(f"{source}: a pickle without an end")


_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING"  # noqa: SIM905
    " UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)


class _Machine:
    """The stack, the marks and the memo of a pickle."""

    def __init__(self, constructors: dict[str, Construct], most_copies: int) -> None:
        self.constructors = {"collections.OrderedDict": self._ordered, "torch.Size": _size} | constructors
        self.copies_left = most_copies
        """Items that may still be copied. A pickle has fewer items than bytes."""
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_mark(self) -> list[object]:
        begin = self.marks.pop()
        values = self.stack[begin:]
        del self.stack[begin:]
        return values

    def execute(self, name: str, argument: object) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _TUPLES:
            self.stack.append(tuple(reversed([self.pop() for _ in range(_TUPLES[name])])))
        elif name not in ("PROTO", "FRAME", "STOP"):
            act = getattr(self, f"_{name.lower()}", None)
            if act is None:
                raise UserError(f"opcode {name}, which no checkpoint needs")
            act(argument)

    def _mark(self, argument: object) -> None:
        self.marks.append(len(self.stack))

    def _tuple(self, argument: object) -> None:
        self.stack.append(tuple(self.pop_mark()))

    def _list(self, argument: object) -> None:
        self.stack.append(self.pop_mark())

    def _dict(self, argument: object) -> None:
        made: dict[Any, Any] = {}
        values = self.pop_mark()
        self.stack.append(made)
        _put(made, values)

    def _frozenset(self, argument: object) -> None:
        self.stack.append(Inert(Name("builtins", "frozenset"), items=self.pop_mark()))

    def _append(self, argument: object) -> None:
        value = self.pop()
        _extend(self.stack[-1], [value])

    def _appends(self, argument: object) -> None:
        values = self.pop_mark()
        _extend(self.stack[-1], values)

    _additems = _appends

    def _setitem(self, argument: object) -> None:
        value, key = self.pop(), self.pop()
        _put(self.stack[-1], [key, value])

    def _setitems(self, argument: object) -> None:
        values = self.pop_mark()
        _put(self.stack[-1], values)

    def _pop(self, argument: object) -> None:
        self.pop()

    def _pop_mark(self, argument: object) -> None:
        self.pop_mark()

    def _dup(self, argument: object) -> None:
        self.stack.append(self.stack[-1])

    def _put(self, argument: Any) -> None:
        self.memo[int(argument)] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, argument: object) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _get(self, argument: Any) -> None:
        self.stack.append(self.memo[int(argument)])

    _binget = _long_binget = _get

    def _global(self, argument: Any) -> None:
        self.stack.append(_checked(*argument.split(" ", 1)))

    def _stack_global(self, argument: object) -> None:
        name, module = self.pop(), self.pop()
        self.stack.append(_checked(module, name))

    def _reduce(self, argument: object) -> None:
        arguments, made_by = self.pop(), self.pop()
        self.stack.append(self._make(made_by, arguments))

    def _newobj(self, argument: object) -> None:
        self._reduce(argument)

    def _newobj_ex(self, argument: object) -> None:
        _, arguments, made_by = self.pop(), self.pop(), self.pop()
        self.stack.append(self._make(made_by, arguments))

    def _build(self, argument: object) -> None:
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state
        # A state dict has an attribute _metadata, and a tensor may have attributes: neither is read.

    def _binpersid(self, argument: object) -> None:
        match self.pop():
            case ("storage", Name() as kind, str(key), str(), int(numel)) if numel >= 0:
                self.stack.append(Storage(kind.name, key, numel))
            case other:
                raise UserError(f"a persistent id that is no storage ({type(other).__name__})")

    def _ordered(self, arguments: tuple[Any, ...]) -> dict[object, object]:
        made: dict[Any, Any] = {}
        for pair in arguments[0] if arguments else ():
            self.copies_left -= 1
            if self.copies_left < 0:
                raise UserError("dicts with more items than the pickle has")
            key, value = pair
            _put(made, [key, value])
        return made

    def _make(self, made_by: object, arguments: object) -> Any:
        if not isinstance(made_by, Name) or not isinstance(arguments, tuple):
            raise UserError("a call of something that is no name, or without arguments")
        if made_by == Name("copyreg", "_reconstructor") and arguments and isinstance(arguments[0], Name):
            return Inert(arguments[0])
        construct = self.constructors.get(str(made_by))
        return construct(arguments) if construct is not None else Inert(made_by, arguments)


_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": lambda: Inert(Name("builtins", "set")),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _checked(module: object, name: object) -> Name:
    """Returns a name, if a checkpoint may contain it."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise UserError("a name that is no text")
    module = _OLD_NAMES.get(module, module)
    package = module.split(".")[0]
    if package not in KNOWN_PACKAGES or (package == "builtins" and name not in _HARMLESS_BUILTINS):
        raise UserError(f"it names {module}.{name}, which no checkpoint of Megatron-LM does")
    return Name(module, name)


def _size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    (sizes,) = arguments
    if len(sizes) > _MAX_DIMS:
        raise UserError(f"a torch.Size of {len(sizes)} numbers")
    return tuple(sizes)


def _put(target: object, values: list[object]) -> None:
    if len(values) % 2:
        raise ValueError("a key without a value")
    pairs = list(zip(values[::2], values[1::2], strict=True))
    if isinstance(target, Inert):
        target.items += pairs
    elif isinstance(target, dict):
        for key, value in pairs:
            target[_checked_key(key)] = value
    else:
        raise TypeError(f"items of a {type(target).__name__}")


def _extend(target: object, values: list[object]) -> None:
    if isinstance(target, Inert):
        target.items += values
    elif isinstance(target, list):
        target += values
    else:
        raise TypeError(f"elements of a {type(target).__name__}")


def shown(value: object) -> str:
    """Returns a value of a pickle for a message. Values inside others are shown only if they are numbers, texts or
    names: the text of nested ones can have exponential length."""
    parts = value if isinstance(value, list | tuple) else (value,)
    plain = all(part is None or isinstance(part, str | int | float | Name) for part in parts)
    return str(value)[:80] if plain else f"a {type(value).__name__}"


def _checked_key(key: object) -> object:
    """Returns a key of a dict whose hash is fast: nested tuples can take exponential time."""
    parts = key if isinstance(key, tuple) else (key,)
    if len(parts) > _MAX_KEY_LENGTH or not all(
        part is None or isinstance(part, str | bytes | int | float | Name | Inert) for part in parts
    ):
        raise TypeError(f"a {type(key).__name__} as key of a dict")
    return key
