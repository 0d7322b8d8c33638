"""Takes files of other programs into a command line: --deepspeed_config, --accelerate_config."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import Flag, flag_table, flags_by_spelling, text_of
from megatron.training.config.foreign.accelerate import read_accelerate_file
from megatron.training.config.foreign.answers import Reading, Setting
from megatron.training.config.foreign.deepspeed import read_deepspeed_file
from megatron.training.config.retired import Occurrence

_READERS: Mapping[str, Callable[[str, str], Reading]] = {
    "deepspeed_config": read_deepspeed_file,
    "accelerate_config": read_accelerate_file,
}
"""Field that names a file, and the function that reads it."""

_WITH_A_FILE = {"--deepspeed": "deepspeed_config"}
"""Other spellings, which `retired` translates."""


class Line(Protocol):
    """The parts of a command line (`CommandLine`) that foreign files change."""

    values: dict[str, object]
    given: dict[str, str]
    problems: list[str]
    broken: set[str]
    from_recipe: dict[str, object]
    from_foreign: dict[str, str]
    warnings: list[str]


def read_foreign_files(line: Line, occurrences: Sequence[Occurrence]) -> list[Reading]:
    """Returns what the files say that the flags name; of a repeated flag the last. Mistakes are added to
    `line.problems`."""
    named: dict[str, Occurrence] = {}
    for occurrence in occurrences:
        flag = flags_by_spelling().get(occurrence.spelling)
        field = _WITH_A_FILE.get(occurrence.spelling) if flag is None else flag.field
        if field is not None and field in _READERS and len(occurrence.words) == 1:
            named[field] = occurrence
    found: list[Reading] = []
    for field, occurrence in named.items():
        try:
            found.append(_READERS[field](occurrence.spelling, occurrence.words[0]))
        except UserError as error:
            line.problems.append(str(error))
    for reading in found:
        line.problems += reading.problems
        line.warnings += reading.lines()
    return found


def take_foreign_files(line: Line, readings: Sequence[Reading]) -> None:
    """Takes what the files state. Config files and the command line come after it."""
    for setting in _settings(readings, stated=True):
        flag = flag_table()[setting.field]
        try:
            value = value_of(flag, setting.value)
        except ValueError as error:
            line.problems.append(f"{setting.where}: {setting.value}: {error}")
            line.broken.add(setting.field)
            continue
        if setting.field in line.given and setting.field not in line.from_recipe:
            continue  # a difference is found at the end
        if value != line.values[setting.field] or setting.field in line.from_recipe:
            line.values[setting.field] = value
            line.given[setting.field] = flag.spelling
            line.from_foreign[setting.field] = setting.where
            line.from_recipe.pop(setting.field, None)


def finish_foreign_files(line: Line, readings: Sequence[Reading]) -> None:
    """Adds a problem for each flag or config file that contradicts a foreign file, and then takes the defaults of the
    other program for fields that nothing has given."""
    contradicted: set[str] = set()
    for setting in _settings(readings, stated=True):
        flag = flag_table()[setting.field]
        given = line.given.get(setting.field)
        if given is None or setting.field in line.broken | contradicted:
            continue
        try:
            wanted, value = value_of(flag, setting.value), line.values[setting.field]
        except ValueError:
            continue  # a problem already
        if value != wanted:
            contradicted.add(setting.field)
            line.problems.append(
                f"{_words(flag, value, given)} contradicts {setting.where} ({_words(flag, wanted)}); give one of them"
            )
    stated = {setting.field for setting in _settings(readings, stated=True)}
    for setting in _settings(readings, stated=False):
        if not (line.given.keys() | stated) & {setting.field, *setting.unless}:
            flag = flag_table()[setting.field]
            value = value_of(flag, setting.value)
            if value != line.values[setting.field]:
                line.values[setting.field] = value
                line.given[setting.field] = flag.spelling
                line.from_foreign[setting.field] = f"{setting.where}, by default"


def _settings(readings: Sequence[Reading], stated: bool) -> Iterator[Setting]:
    return (setting for reading in readings for setting in reading.settings if setting.stated is stated)


def value_of(flag: Flag, value: object) -> object:
    """Returns a value of a field from that of a foreign setting. Raises ValueError that says what works."""
    if flag.switch is not None or value is None:
        return value
    if isinstance(value, list | tuple):
        return [flag.parse(str(one)) for one in value]
    return flag.parse(str(value))


def words_of_setting(flag: Flag, value: object) -> list[str]:
    """Returns the words that give a flag this value; none if no words give it."""
    if flag.switch is not None:
        return [spelling for spelling, sets in flag.switch.items() if sets is value][:1]
    if value is None:
        return []
    words = [str(one) for one in value] if isinstance(value, list) else [text_of(flag.field, value)]
    return [flag.spelling, *words]


def _words(flag: Flag, value: object, spelling: str | None = None) -> str:
    words = words_of_setting(flag, value)
    if not words:
        return f"no {flag.spelling}"
    return " ".join([spelling or words[0], *words[1:]] if flag.switch is None else words)
