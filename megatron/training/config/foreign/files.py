"""Reads JSON and YAML files of other programs, with errors that name flag, file and line."""

import json
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.core.utils.yaml_files import read_yaml


def load_json(flag: str, path: str) -> dict[str, object]:
    """Returns the object of a JSON file. Raises UserError, also for a key that is given twice."""
    try:
        text = Path(path).read_text("utf-8-sig")  # editors of Windows write a byte order mark
        found = json.loads(text, object_pairs_hook=_without_repetition) if text.strip() else None
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path}: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} {path}:{error.lineno}: {error.msg}") from None
    except RecursionError:
        raise UserError(f"{flag} {path}: values are nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{flag} {path}: {error}") from None
    return _mapping(flag, path, found)


def load_yaml(flag: str, path: str) -> dict[str, object]:
    """Returns the mapping of a YAML file. Raises UserError."""
    return _mapping(flag, path, read_yaml(path, flag))


def _mapping(flag: str, path: str, found: object) -> dict[str, object]:
    if found is None:
        raise UserError(f"{flag} {path}: the file is empty")
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UserError(f"{flag} {path}: expected names and values at the top of the file")
    return found


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is given twice")
    return found
