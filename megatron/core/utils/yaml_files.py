"""Reads YAML files, for which a mistake is one sentence."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError


def read_yaml(path: str | Path, flag: str = "", *, as_text: bool = False) -> Any:
    """Returns the content of a YAML or JSON file; with `as_text` all values are strings, as they are written. Raises
    UserError, naming `flag`, file and line, for a file that cannot be read or has a key twice."""
    place = f"{flag} {path}".lstrip()
    with reading_yaml(place) as yaml:
        text = Path(path).read_text("utf-8")
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), yaml, place)
        return yaml.load(text, Loader=yaml.BaseLoader if as_text else yaml.SafeLoader)


@contextlib.contextmanager
def reading_yaml(place: str, lines_before: int = 0) -> Iterator[Any]:
    """Gives the module yaml. Raises UserError, naming `place` and the line, if the package is missing, and for a file
    or a YAML text that cannot be read inside the context. `lines_before` are lines of the file before the text."""
    try:
        yaml = importlib.import_module("yaml")  # an optional package
    except ImportError as error:
        raise UserError(f"{place}: reading it needs the package pyyaml (pip install pyyaml): {error}") from None
    try:
        yield yaml
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{place}: not UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1 + lines_before}" if mark is not None else ""
        raise UserError(f"{place}{line}: neither YAML nor JSON: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise UserError(f"{place}: values are nested too deeply") from None


def _refuse_repeated_keys(node: Any, yaml: Any, place: str) -> None:
    """Raises UserError if a mapping has a key twice, of which YAML's loader would take the last."""
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_repeated_keys(value, yaml, place)
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode):
            if key.value in lines:
                raise UserError(f"{place}:{line}: {key.value} is in line {lines[key.value]} too; give one")
            lines[key.value] = line
        _refuse_repeated_keys(value, yaml, place)
