"""--config: flags from a YAML or JSON file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.yaml_files import reading_yaml
from megatron.training.config.flag_table import GROUPS, Flag, flag_table, flags_by_spelling
from megatron.training.config.retired import Occurrence, is_flag

BEGIN, END = "# settings of this run; --config reads them", "# end of the settings"
"""Lines that --print-config prints before and after a config. Of a file with these lines, only what is between them is
read, so that the whole output of a program can be saved and given to --config."""

_SECTIONS = {*(group.replace(" ", "_") for group in GROUPS), "language_model", "model_parallel"}
"""Keys whose value is a mapping of further keys: the sections of --help, and those of Megatron-LM's --yaml-cfg."""


_BESIDE_THE_FILE = ("data_contract",)
"""Fields that name a file beside the config file, if there is one of this name: tools/plan.py writes both files into
one folder, from which they may be moved together."""


@dataclass(frozen=True)
class FileSetting:
    """A setting of a config file."""

    where: str
    """File and line, for messages."""
    occurrence: Occurrence
    """The flag and words that mean the same."""


def read_config_file(path: str) -> tuple[list[FileSetting], list[str]]:
    """Returns the settings of a file, and its mistakes, each with file and line. Raises UserError if it cannot be read
    or is not YAML.

    A key is the name of a field or of a flag, with or without dashes (num_layers, num-layers). A switch is true or
    false, a list gives several words, null leaves the default.
    """
    with reading_yaml(f"--config {path}") as yaml:
        text, skipped = _part_between_marks(Path(path).read_text("utf-8"))
    with reading_yaml(f"--config {path}", skipped):
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return [], []
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"--config {path}: expected keys and values, such as num_layers: 12")
    entries: list[FileSetting] = []
    problems: list[str] = []
    earlier: dict[str, tuple[Any, Any]] = {}
    for key, value in _settings(yaml, root):
        where = f"{path}:{key.start_mark.line + 1 + skipped}"
        try:
            occurrence = _occurrence(yaml, key.value, value)
        except ValueError as error:
            problems.append(f"{where}: {error}")
        else:
            line, before = earlier.setdefault(_named(key.value), (key.start_mark.line + 1 + skipped, occurrence))
            if before != occurrence:
                problems.append(f"{where}: {key.value} has another value in line {line}; give one")
            if occurrence is not None and _named(key.value) in _BESIDE_THE_FILE:
                beside = Path(path).parent / occurrence.words[0]
                if beside.is_file():
                    occurrence = Occurrence(occurrence.spelling, (str(beside),))
            entries += [FileSetting(where, occurrence)] if occurrence is not None else []
    return entries, problems


def _part_between_marks(text: str) -> tuple[str, int]:
    """Returns the lines between BEGIN and END, or all, and the number of lines before them."""
    lines = text.splitlines()
    if BEGIN not in lines:
        return text, 0
    first = lines.index(BEGIN) + 1
    last = lines.index(END) if END in lines else len(lines)
    return "\n".join(lines[first:last]), first


def _settings(yaml: Any, mapping: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in mapping.value:
        if isinstance(value, yaml.MappingNode) and key.value in _SECTIONS:
            yield from _settings(yaml, value)
        else:
            yield key, value


def _named(key: str) -> str:
    """Returns the field that a key names; its spelling as a flag if there is no such field."""
    spelling = f"--{key.removeprefix('--').replace('_', '-')}"
    flag = flag_table().get(key) or flags_by_spelling().get(spelling)
    return spelling if flag is None else flag.field


def _occurrence(yaml: Any, key: str, value: Any) -> Occurrence | None:
    """Returns the flag and words of a setting; None if it leaves the default. Raises ValueError."""
    spelling = f"--{key.removeprefix('--').replace('_', '-')}"
    flag = flag_table().get(key) or flags_by_spelling().get(spelling)
    if flag is not None and flag.field == "config_file":
        raise ValueError("a config file cannot name another")
    if isinstance(value, yaml.MappingNode):
        raise ValueError(f"{key}: expected a value, not further keys")
    items = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if not all(isinstance(item, yaml.ScalarNode) for item in items):
        raise ValueError(f"{key}: expected a list of values without further lists")
    if not isinstance(value, yaml.SequenceNode) and value.tag == "tag:yaml.org,2002:null":
        return None
    words = tuple(item.value for item in items)
    strange = [word for word in words[1:] if is_flag(word)]
    if strange:
        raise ValueError(f"{key}: {strange[0]} looks like a flag; only the first word of a list may")
    if flag is None and value.tag == "tag:yaml.org,2002:bool":  # a retired flag, or one of a script
        return Occurrence(spelling) if value.value.lower() == "true" else None
    if flag is None:
        return Occurrence(spelling, words)
    if flag.switch is not None:
        return _switch(key, flag, value, yaml)
    return Occurrence(flag.spelling, words)


def _switch(key: str, flag: Flag, value: object, yaml: Any) -> Occurrence | None:
    if not isinstance(value, yaml.ScalarNode) or value.tag != "tag:yaml.org,2002:bool":
        raise ValueError(f"{key}: expected true or false")
    assert flag.switch is not None
    wanted = value.value.lower() in ("true", "yes", "on")
    if key != flag.field and f"--{key}".replace("_", "-") in flag.switch:  # such as no-load-rng: true
        wanted = flag.switch[f"--{key}".replace("_", "-")] is wanted
    spellings = [spelling for spelling, sets in flag.switch.items() if sets is wanted]
    if not spellings and bool(flag.default) is not wanted:
        raise ValueError(f"{key}: cannot be {value.value}")
    return Occurrence(spellings[0]) if spellings else None
