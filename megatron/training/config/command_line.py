"""Parses a command line into values, and collects all mistakes instead of stopping at the first."""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron.core.exceptions import UserError
from megatron.training.config.config_file import FileSetting, read_config_file
from megatron.training.config.data import DATA_SOURCES
from megatron.training.config.flag_table import GROUPS, SAME_THING, Flag, flag_table, flags_by_spelling
from megatron.training.config.foreign.taking import finish_foreign_files, read_foreign_files, take_foreign_files
from megatron.training.config.help_text import help_about, help_text, help_topic
from megatron.training.config.recipes.catalogue import fields_of_recipes, recipe_named
from megatron.training.config.retired import REFUSED, RETIRED, Occurrence, is_flag, text_of, translate_all
from megatron.training.config.unsupported_flags import ACCEPTED_FLAGS, REFUSED_FLAGS
from megatron.training.config.version import version_text

ExtraArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


@dataclass
class CommandLine:
    """The parsed command line."""

    values: dict[str, Any]
    """Value of every field: given, or the app's default."""
    given: dict[str, str] = field(default_factory=dict)
    """Fields that a flag has set, and the spelling of that flag."""
    script: set[str] = field(default_factory=set)
    """Fields whose default the user's script changed."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values of the arguments that the user's script has added, by name."""
    problems: list[str] = field(default_factory=list)
    """Mistakes, one line each."""
    broken: set[str] = field(default_factory=set)
    """Fields whose value could not be parsed. Further problems of these fields are not reported."""
    from_files: set[str] = field(default_factory=set)
    """Fields that a config file or a recipe has set. A flag of the command line replaces their value."""
    from_recipe: dict[str, Any] = field(default_factory=dict)
    """Fields that --recipe has set, with their value before."""
    from_foreign: dict[str, str] = field(default_factory=dict)
    """Fields that a file of another program has set, and the file and name there."""
    warnings: list[str] = field(default_factory=list)
    """Lines about retired flags and about unknown flags that the script ignores."""

    def leave_recipe(self, field: str) -> None:
        """Gives a field that the recipe has set its value before."""
        self.values[field] = self.from_recipe.pop(field)
        del self.given[field]


def read_command_line(
    argv: Sequence[str],
    extra_args_provider: ExtraArgsProvider | None = None,
    ignore_unknown_args: bool = False,
) -> CommandLine:
    """Parses the words after the program's name. Prints help and exits after --help. Raises nothing else: mistakes are
    collected in `problems`.

    `extra_args_provider` adds a script's own arguments to the parser, and may change defaults with `set_defaults`.
    """
    line = CommandLine({name: flag.default for name, flag in flag_table().items()})
    parser = _parser_of(extra_args_provider, line) if extra_args_provider is not None else None
    script_spellings = parser._option_string_actions if parser is not None else {}
    occurrences, strays = split_words(argv)
    said = line.warnings if ignore_unknown_args else line.problems
    said += [f"{word}: this word belongs to no flag{_IGNORED if ignore_unknown_args else ''}" for word in strays]
    topic = help_topic(occurrences)
    if topic is not None:
        _print_help(parser or Parser(), topic)
    if any(occurrence.spelling == "--version" for occurrence in occurrences) and "--version" not in script_spellings:
        print(version_text())
        raise SystemExit(0)
    settings = _read_config_files(line, occurrences)
    take_recipe(line, [*(setting.occurrence for setting in settings), *occurrences])
    foreign = read_foreign_files(line, occurrences)
    take_foreign_files(line, foreign)
    of_script = _take_config_files(line, settings, script_spellings)
    replaced = list(_replaced_flags(occurrences))
    occurrences, warnings = translate_all(occurrences)
    line.warnings += [*warnings, *replaced]
    occurrences = _without_replaced_data(line, occurrences)
    of_script += take_all(line, occurrences, script_spellings, ignore_unknown_args)
    finish_foreign_files(line, foreign)
    complete_recipe(line)
    if parser is not None:
        _take_script_arguments(line, parser, of_script)
    unknown = [place for place, problem in enumerate(line.problems) if ": unknown flag; " in problem]
    if unknown:
        line.problems[unknown[-1]] += f" ({_MIGRATION})"
    return line


_IGNORED = ", and ignored as the script asks"
_MIGRATION = "tools/migrate_args.py rewrites commands and scripts of other releases of Megatron-LM"


def _print_help(parser: "Parser", topic: str) -> NoReturn:
    """Prints the help about a topic and exits: with code 2 if there is no such topic."""
    try:
        text = parser.help_about(topic)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(text, end="")
    raise SystemExit(0)


def take_all(
    line: CommandLine, occurrences: Iterable[Occurrence], script_spellings: Collection[str], ignore_unknown_args: bool
) -> list[Occurrence]:
    """Takes flags into `line`. Returns those whose spellings are in `script_spellings`, which a script has added."""
    table = flags_by_spelling()
    of_script: list[Occurrence] = []
    for occurrence in occurrences:
        if occurrence.spelling in table:
            take_flag(line, table[occurrence.spelling], occurrence)
        elif occurrence.spelling in script_spellings:
            of_script.append(occurrence)
        elif occurrence.spelling in ACCEPTED_FLAGS:
            line.warnings.append(f"{text_of(occurrence)}: {ACCEPTED_FLAGS[occurrence.spelling]}")
        elif occurrence.spelling in REFUSED:
            line.problems.append(f"{text_of(occurrence)}: {REFUSED[occurrence.spelling]}")
        elif ignore_unknown_args:
            line.warnings.append(f"{occurrence.spelling}: unknown{_IGNORED}")
        else:
            line.problems.append(unknown_flag(occurrence.spelling, (*table, *script_spellings)))
    return of_script


def _read_config_files(line: CommandLine, occurrences: Sequence[Occurrence]) -> list[FileSetting]:
    """Returns the settings of the files that --config and --yaml-cfg name. Mistakes are added to `line.problems`."""
    settings: list[FileSetting] = []
    for occurrence in occurrences:
        for path in occurrence.words if occurrence.spelling in ("--config", "--yaml-cfg") else ():
            try:
                entries, problems = read_config_file(path)
            except UserError as error:
                line.problems.append(str(error).replace("--config", occurrence.spelling, 1))
                continue
            line.problems += problems
            settings += entries
    return settings


def _take_config_files(
    line: CommandLine, settings: Iterable[FileSetting], script_spellings: Collection[str]
) -> list[Occurrence]:
    """Takes the settings of config files. Their problems begin with file and line. Returns those that a script has
    added."""
    of_script: list[Occurrence] = []
    for setting in settings:
        known = len(line.problems)
        today, warnings = translate_all([setting.occurrence])
        line.warnings += [f"{setting.where}: {warning}" for warning in warnings]
        of_script += take_all(line, today, script_spellings, False)
        line.problems[known:] = [f"{setting.where}: {problem}" for problem in line.problems[known:]]
    line.from_files = set(line.given)
    return of_script


def take_recipe(line: CommandLine, occurrences: Iterable[Occurrence]) -> None:
    """Takes the flags of the recipe that the last --recipe among `occurrences` names. What a file or the command line
    gives must be taken after it."""
    names = [
        occurrence.words[0] for occurrence in occurrences if occurrence.spelling == "--recipe" and occurrence.words
    ]
    if not names:
        return
    try:
        recipe = recipe_named(names[-1])
    except UserError as error:
        line.problems.append(f"--recipe {error}")
        line.broken |= fields_of_recipes() | _OF_TOKENIZER  # what it lacks now is no further mistake
        return
    before = {field: line.values[field] for field in recipe.flags}
    for flag, occurrence in recipe.occurrences():
        take_flag(line, flag, occurrence)
    line.from_recipe = before


def complete_recipe(line: CommandLine) -> None:
    """Leaves out flags of the recipe that the user's flags say in another way. Without data, the tokenizer may be
    missing too: then ids are text, as many as the recipe's model has. A warning lists what is taken."""
    if not line.from_recipe:
        return
    for given in line.given.keys() - line.from_recipe.keys():
        for other in SAME_THING.get(given, ()):
            if other in line.from_recipe:
                line.leave_recipe(other)
    recipe = recipe_named(line.values["recipe"])
    words = [word for flag, one in recipe.occurrences() if flag.field in line.from_recipe for word in one.as_words()]
    line.warnings.append(f"--recipe {recipe.name}: {' '.join(words)}")
    if (
        _OF_TOKENIZER & line.given.keys()
        or recipe.model_family != "gpt"
        or not (line.values["dry_run"] or line.values["mock_data"])
    ):
        return
    ids = {"tokenizer_type": "NullTokenizer", "vocab_size": recipe.vocabulary - 1}
    line.from_recipe |= {field: line.values[field] for field in ids}
    line.values |= ids
    line.given |= {field: flag_table()[field].spelling for field in ids}
    line.warnings.append(
        f"--recipe {recipe.name}: no tokenizer is given, so token ids are the text, and the embedding has the "
        f"published {recipe.vocabulary} rows; a run on data needs --tokenizer-type"
    )


_OF_TOKENIZER = frozenset(("tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file"))
"""Fields that say which tokenizer a run has."""


def split_words(argv: Iterable[str]) -> tuple[list[Occurrence], list[str]]:
    """Returns the flags, each with the words that follow it, and the words before the first flag.

    A word that begins with two dashes is a flag. `--flag=word` also works, and allows a value that begins with dashes.
    """
    occurrences: list[Occurrence] = []
    strays: list[str] = []
    for word in argv:
        if is_flag(word):
            spelling, equals, value = word.partition("=")
            occurrences.append(Occurrence(spelling, (value,) if equals else ()))
        elif occurrences:
            last = occurrences[-1]
            occurrences[-1] = Occurrence(last.spelling, (*last.words, word))
        else:
            strays.append(word)
    return occurrences, strays


def kept_words(occurrences: Iterable[Occurrence], is_kept: Callable[[Flag | None], bool]) -> list[str]:
    """Returns the words of the flags that are kept. `is_kept` gets None for a flag that is not known."""
    table = flags_by_spelling()
    return [word for one in occurrences if is_kept(table.get(one.spelling)) for word in one.as_words()]


def _replaced_flags(occurrences: Iterable[Occurrence]) -> Iterator[str]:
    """Yields a line for each flag that is given again with another value. Scripts append flags to change earlier ones,
    so the last one counts, as in argparse."""
    last: dict[str, Occurrence] = {}
    for occurrence in occurrences:
        flag = flags_by_spelling().get(occurrence.spelling)
        if flag is None or flag.declaration.gathers:
            continue
        earlier = last.get(flag.field)
        if earlier is not None and (_value(flag, earlier) != _value(flag, occurrence)):
            yield f"{text_of(occurrence)} replaces {text_of(earlier)}, which is before it on the command line"
        last[flag.field] = occurrence


def _without_replaced_data(line: CommandLine, occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Returns the flags without those of data sets that a later --mock-data replaces, and adds a line about each. So
    flags at the end of a command turn it into a trial."""
    places = [place for place, occurrence in enumerate(occurrences) if occurrence.spelling == "--mock-data"]
    if not places:
        return list(occurrences)
    kept = []
    for place, occurrence in enumerate(occurrences):
        flag = flags_by_spelling().get(occurrence.spelling)
        if flag is not None and flag.field in DATA_SOURCES and place < places[-1]:
            line.warnings.append(f"--mock-data replaces {text_of(occurrence)}, which is before it")
        else:
            kept.append(occurrence)
    for source in DATA_SOURCES & line.from_files:
        line.values[source] = None
        line.from_files.discard(source)
        line.warnings.append(f"--mock-data replaces {line.given.pop(source)} of the config file")
    return kept


def _value(flag: Flag, occurrence: Occurrence) -> object:
    return occurrence.words if flag.switch is None else flag.switch[occurrence.spelling]


def unknown_flag(spelling: str, known: Iterable[str]) -> str:
    """Returns the error message for an unknown flag: a flag of Megatron-LM that is missing here, a shortened flag, or a
    misspelt one, with the nearest known flags."""
    if spelling in REFUSED_FLAGS:
        return f"{spelling}: {REFUSED_FLAGS[spelling]}"
    known = sorted({*known, *RETIRED} - {"-h"})
    longer = [candidate for candidate in known if candidate.startswith(spelling)]
    if longer:
        return f"{spelling}: flags are not shortened here; did you mean {_either(longer[:4])}?"
    underscores = spelling.replace("_", "-")
    if underscores in known:
        return f"{spelling}: unknown flag; did you mean {underscores}?"
    names = [candidate.removeprefix("--") for candidate in known]  # without the dashes, which make all flags similar
    close = difflib.get_close_matches(spelling.removeprefix("--"), names, n=3, cutoff=0.6)
    if close:
        return f"{spelling}: unknown flag; did you mean {_either([f'--{name}' for name in close])}?"
    return f"{spelling}: unknown flag; --help all lists all"


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


# ---------------------------------------------------------------------------------------------------------------------
# The app's flags


def take_flag(line: CommandLine, flag: Flag, occurrence: Occurrence) -> None:
    """Parses the words of one flag into `line.values`. A mistake is added to `line.problems` and `line.broken`."""
    spelling, words = occurrence.spelling, occurrence.words
    continues = flag.declaration.gathers and flag.field in line.given and flag.field not in line.from_files
    before = line.values[flag.field] if continues else []
    line.given[flag.field] = spelling
    line.from_files.discard(flag.field)
    line.from_recipe.pop(flag.field, None)
    line.from_foreign.pop(flag.field, None)
    line.broken.discard(flag.field)
    problem = _count_problem(flag, spelling, words)
    if problem is None and flag.switch is not None:
        line.values[flag.field] = flag.switch[spelling]
        return
    values = []
    for word in words if problem is None else ():
        try:
            values.append(flag.parse(word))
        except ValueError as error:
            problem = f"{spelling} {word or repr(word)}: {(flag.declaration.hints or {}).get(word, error)}"
            break
    if problem is not None:
        line.problems.append(problem)
        line.broken.add(flag.field)
    elif flag.nargs is None or (flag.one_or_list and len(values) == 1):
        line.values[flag.field] = values[0]
    else:
        line.values[flag.field] = [*(before or []), *values]


def _count_problem(flag: Flag, spelling: str, words: Sequence[str]) -> str | None:
    count = len(words)
    if flag.nargs == 0:
        return f"{spelling} {' '.join(words)}: this flag takes no value" if words else None
    if flag.nargs is None and count > 1:
        return (
            f"{spelling} {' '.join(words)}: takes one value; {' '.join(words[1:])} belongs to no flag{_dashes(words)}"
        )
    if flag.nargs in (None, "+") and count == 0:
        return f"{spelling}: a value is missing{_examples(flag)}"
    if isinstance(flag.nargs, int) and count != flag.nargs:
        return f"{spelling} {' '.join(words)}: takes {flag.nargs} values, not {count}"
    return None


_ONE_DASH = re.compile(r"[-\u2013\u2014]{1,2}(?=[A-Za-z])")
"""One or two dashes before a word, including the long dashes that word processors insert."""


def _dashes(words: Sequence[str]) -> str:
    meant = [_ONE_DASH.sub("--", word, count=1) for word in words if _ONE_DASH.match(word)]
    return f"; flags begin with two dashes: {' '.join(meant)}" if meant else ""


def _examples(flag: Flag) -> str:
    return f"; choose from {', '.join(flag.choices)}" if flag.choices else ""


# ---------------------------------------------------------------------------------------------------------------------
# Arguments that a user's script adds


class Parser(argparse.ArgumentParser):
    """An argparse parser for the arguments of user scripts. Errors raise UserError; help lists the app's flags too."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of exiting."""
        raise UserError(message)

    def help_about(self, topic: str) -> str:
        """Returns what --help followed by these words prints."""
        return help_about(self.prog, topic, self._own_help())

    def format_help(self) -> str:
        """Returns the help of all flags, followed by the arguments that the script has added."""
        return help_text(self.prog, self._own_help())

    def _own_help(self) -> str:
        own = flags_by_spelling()
        formatter = self._get_formatter()
        formatter.start_section("this script's own flags")
        formatter.add_arguments(
            action for action in self._actions if action.dest != "help" and not own.keys() & action.option_strings
        )
        formatter.end_section()
        return formatter.format_help()


def argument_parser() -> Parser:
    """Returns a parser that knows all flags, so that a script can add arguments to it. It does not parse the app's own
    flags: `take_flag` does."""
    parser = Parser(description="Train a GPT.", allow_abbrev=False, conflict_handler="error")
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for flag in flag_table().values():
        group = groups[flag.group]
        keywords: dict[str, Any] = {"dest": flag.field, "default": flag.default}
        if flag.switch is None:
            group.add_argument(*flag.spellings, nargs=flag.nargs, **keywords)
        else:
            for spelling, value in flag.switch.items():
                group.add_argument(spelling, action="store_const", const=value, **keywords)
    return parser


def _parser_of(provider: ExtraArgsProvider, line: CommandLine) -> Parser:
    """Returns the parser with a script's arguments. Defaults that the script sets for the app's flags go to `line`."""
    parser = argument_parser()
    try:
        returned = provider(parser)
    except argparse.ArgumentError as error:
        line.problems.append(f"extra_args_provider: {error}; this flag already exists")
        return parser
    if not isinstance(returned, argparse.ArgumentParser):
        line.problems.append("extra_args_provider must return the parser that it was given")
        return parser
    for name, flag in flag_table().items():
        default = parser.get_default(name)
        if default is not flag.default and default != flag.default:
            line.values[name] = default
            line.script.add(name)
    return parser


def _take_script_arguments(line: CommandLine, parser: Parser, occurrences: Sequence[Occurrence]) -> None:
    words = [word for occurrence in occurrences for word in occurrence.as_words()]
    try:
        namespace, rest = parser.parse_known_args(words)
    except UserError as error:
        line.problems.append(str(error))
        return
    except argparse.ArgumentError as error:
        line.problems.append(str(error))
        return
    line.problems += [f"{word}: this word belongs to no flag" for word in rest]
    own = flag_table().keys() | {"help"}
    line.extra = {name: value for name, value in vars(namespace).items() if name not in own}
