"""Parsers of flag values with a grammar: patterns over layers, tuples of integers, pipeline stages."""

import contextlib
import re

MOST_LAYERS = 1_000_000
"""Layers that a model may have. Lists and strings with an entry for each layer are built from this number."""

_TOKEN = re.compile(r"\s*(\d+|[\[\](),+*])")


def layer_pattern(text: str) -> int | list[int]:
    """Parses `4`, or a list expression over digits with `+`, `*` and parentheses: `([0]*3+[1]*58)`.

    Raises ValueError for anything else. Does not evaluate the text as Python.
    """
    if "[" not in text:
        try:
            return int(text)
        except ValueError:
            raise ValueError("neither a number nor a list expression such as ([0]*3+[1]*58)") from None
    tokens = _tokens(text)
    result = _sum(tokens, text)
    if tokens or isinstance(result, int):
        raise ValueError(f"{text!r} is not a list expression such as ([0]*3+[1]*58)")
    return result


def integer_tuple(text: str) -> tuple[int, ...]:
    """Parses `127,0` or `(127,0)`. Raises ValueError if a word is not an integer."""
    return tuple(int(word) for word in text.strip().strip("()").split(",") if word.strip())


def window(text: str) -> tuple[int, ...]:
    """Parses two integers: the numbers of earlier and of later tokens that a token attends to, -1 for all. Raises
    ValueError for anything else."""
    numbers: tuple[int, ...] = ()
    with contextlib.suppress(ValueError):
        numbers = integer_tuple(text)
    if len(numbers) != 2:
        raise ValueError("expected two numbers, tokens before and after, as 127,0")
    return numbers


def number_or_range(text: str) -> int | str:
    """Parses `7`, or a range with both its ends, `7-9`, which stays text. Raises ValueError for anything else, and for
    a range that ends before it begins."""
    if re.fullmatch(r"\d{1,18}", text):
        return int(text)
    found = re.fullmatch(r"(\d{1,18})-(\d{1,18})", text)
    if found is None:
        raise ValueError("expected a number, or a range such as 100-120")
    if int(found[1]) > int(found[2]):
        raise ValueError(f"the range ends before it begins; {found[2]}-{found[1]} works")
    return text


def ends_of(value: int | str) -> tuple[int, int]:
    """Returns the first and the last number of a result of `number_or_range`."""
    first, _, last = str(value).partition("-")
    return int(first), int(last or first)


_REPEATED_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_REPEATED_LETTER = re.compile(r"([EtmL|])\*(\d+)")


def pipeline_layout(text: str) -> list[str]:
    """Parses the layout of pipeline stages: `Et*2|(tt|)*2,L` gives ["Ett", "tt", "tt", "L"].

    Letters: E embedding, t transformer layer, m multi-token prediction layer, L loss. `x*n` repeats a letter or a bar,
    `(...)*n` the text in the parentheses, which do not nest. Commas, spaces and backslashes (which escape parentheses
    in a shell) are ignored. Raises ValueError for anything else.
    """
    letters = text.replace(",", "").replace(" ", "").replace("\\", "")
    for pattern in (_REPEATED_GROUP, _REPEATED_LETTER):
        letters = pattern.sub(lambda match: _times(match[1], int(match[2]), text), letters)
    strange = set(letters) - set("EtmL|")
    if strange:
        raise ValueError(f"{text!r}: {min(strange)!r} is out of place; stages are like Et*3|(tt|)*29,m|L")
    return letters.split("|")


def _times(part: str, times: int, text: str) -> str:
    if len(part) * times > MOST_LAYERS:
        raise ValueError(f"{text!r} is longer than a million layers")
    return part * times


_DEEPEST = 100
"""Largest depth of nested brackets in a list expression, because the parser recurses at each bracket."""


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    depth = 0
    while position < len(text.rstrip()):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text!r}: {text[position]!r} is not allowed; use digits, [ ] ( ) , + *")
        tokens.append(match.group(1))
        position = match.end()
        depth += (match.group(1) in "[(") - (match.group(1) in "])")
        if depth > _DEEPEST:
            raise ValueError(f"{text[:20]}... has more than {_DEEPEST} brackets inside each other")
    return tokens


def _sum(tokens: list[str], text: str) -> int | list[int]:
    value = _product(tokens, text)
    while tokens and tokens[0] == "+":
        tokens.pop(0)
        other = _product(tokens, text)
        if isinstance(value, int) != isinstance(other, int):
            raise ValueError(f"{text!r}: + joins two lists or two numbers")
        value = value + other  # type: ignore[operator]
    return value


def _product(tokens: list[str], text: str) -> int | list[int]:
    value = _atom(tokens, text)
    while tokens and tokens[0] == "*":
        tokens.pop(0)
        other = _atom(tokens, text)
        if isinstance(value, list) and isinstance(other, list):
            raise ValueError(f"{text!r}: * repeats a list a number of times")
        if isinstance(value, int) and isinstance(other, int):
            value = value * other
        else:
            items, times = (value, other) if isinstance(value, list) else (other, value)
            assert isinstance(items, list) and isinstance(times, int)
            if len(items) * times > MOST_LAYERS:
                raise ValueError(f"{text!r} is longer than a million layers")
            value = items * times
    return value


def _atom(tokens: list[str], text: str) -> int | list[int]:
    token = tokens.pop(0) if tokens else ""
    if token.isdigit():
        return int(token)
    if token == "(":
        value = _sum(tokens, text)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError(f"{text!r}: a parenthesis is not closed")
        return value
    if token == "[":
        return _list(tokens, text)
    raise ValueError(f"{text!r} is not a list expression such as ([0]*3+[1]*58)")


def _list(tokens: list[str], text: str) -> list[int]:
    items: list[int] = []
    while tokens and tokens[0] != "]":
        item = _sum(tokens, text)
        if not isinstance(item, int):
            raise ValueError(f"{text!r}: a list holds numbers")
        items.append(item)
        if tokens and tokens[0] == ",":
            tokens.pop(0)
        elif not tokens or tokens[0] != "]":
            break
    if not tokens or tokens.pop(0) != "]":
        raise ValueError(f"{text!r}: a bracket is not closed")
    return items
