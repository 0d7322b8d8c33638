"""Which column is read if the user names none: `text`, or `content` if that is the only column of texts."""

import json
from collections.abc import Callable, Sequence

from megatron.data.preparation.blocks import LineReader
from megatron.data.preparation.inputs import InputFile
from megatron.data.preparation.readers import string_columns

_DEFAULT, _OTHER = "text", "content"
_LONGEST = 256 << 20


def resolve_keys(keys: Sequence[str], files: Sequence[InputFile], warn: Callable[[str], None]) -> list[str]:
    """Returns the keys to read. Looks at the first row of the first file if `keys` is the default. `warn` gets a line
    if another column is taken."""
    if list(keys) != [_DEFAULT] or not files or files[0].kind == "text":
        return list(keys)
    names, texts = string_columns(files[0]) if files[0].has_groups else _columns_of_lines(files[0])
    if _DEFAULT in names or texts != [_OTHER]:
        return list(keys)
    warn(f"--json-keys: {files[0].path} has no key {_DEFAULT!r}; {_OTHER!r}, its only one with texts, is read")
    return [_OTHER]


def _columns_of_lines(file: InputFile) -> tuple[list[str], list[str]]:
    with LineReader(file, _LONGEST) as lines:
        first = next((line for line in lines.lines_before(file.size + _LONGEST) if line is None or line.strip()), None)
    try:
        record = json.loads(first or b"null")
    except (ValueError, RecursionError):
        return [], []
    if not isinstance(record, dict):
        return [], []
    return list(record), [name for name, value in record.items() if isinstance(value, str)]
