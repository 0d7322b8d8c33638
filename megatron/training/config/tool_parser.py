"""An argparse parser for tools whose flags are not those of a run: a mistake is one sentence."""

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from megatron.core.exceptions import UserError

_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


class ToolParser(argparse.ArgumentParser):
    """Raises UserError for mistakes. Its help is the module docstring of the tool, as it is written."""

    def __init__(self, **keywords: object) -> None:
        keywords = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **keywords}
        super().__init__(**keywords)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of printing the usage and exiting."""
        raise UserError(message.removeprefix("argument "))


def number(least: float, most: float, such: str) -> Callable[[str], float]:
    """Returns a parser of numbers within these limits. They may have a unit: 8B is 8e9. `such` are examples for
    messages."""

    def parse(word: str) -> float:
        unit = _UNITS.get(word[-1:].lower(), 1.0)
        try:
            value = float(word[:-1] if unit != 1.0 else word) * unit
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{word}: expected a number from {least:g} to {most:g}, such as {such}")
        return value

    return parse


def whole_number(most: int, such: str) -> Callable[[str], int]:
    """Returns a parser of whole numbers from 1 to `most`. `such` is an example for messages."""

    def parse(word: str) -> int:
        if not (word.isascii() and word.isdecimal()) or not 1 <= int(word) <= most:
            raise argparse.ArgumentTypeError(f"{word}: expected a whole number from 1 to {most}, such as {such}")
        return int(word)

    return parse
