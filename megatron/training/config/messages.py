"""Errors of the library in the words of the command line: it names fields, which users know as flags."""

import functools
import re

from megatron.core.declarations.config_fields import FieldError
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table, spelling_of

_ABOUT_FILES = ("megatron.data.datasets", "megatron.core.dist_checkpointing")
"""Parts of the library whose errors name keys of files, which may have the names of fields."""


def message_of(error: UserError) -> str:
    """Returns the message of an error, with the flags of the fields that it names if the library has raised it.

    A FieldError knows its fields. In the text of another error of `megatron.core` each word that is the name of a field
    becomes its flag, except words of a single part (`seed`), keywords of functions (`name=`), attributes of objects
    other than `config`, and switches whose only flag turns them off.
    """
    if isinstance(error, FieldError):
        return error.text(spelling_of)
    if not _is_of_library(error):
        return str(error)
    return _NAME.sub(lambda match: _flags_of_words().get(match[1], match[0]), str(error))


_NAME = re.compile(r"(?<![\w.\"'`/{-])(?:config\.)?([a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?![\w=(\"'`/]|\.\w)")


def _is_of_library(error: UserError) -> bool:
    module, trace = "", error.__traceback__
    while trace is not None:
        module, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return module.startswith("megatron.core.") and not module.startswith(_ABOUT_FILES)


@functools.cache
def _flags_of_words() -> dict[str, str]:
    flags = flag_table().items()
    return {name: flag.spelling for name, flag in flags if flag.switch is None or flag.switch[flag.spelling]}
