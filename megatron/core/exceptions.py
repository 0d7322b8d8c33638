"""The exception for mistakes of users."""

from typing import Any

from megatron.core.utils.url_keys import hide_keys


class UserError(ValueError):
    """A mistake of the user: in a flag, a file or a call.

    The message names it and says what would work. Entry points (tools, pretrain_*.py) print the message without a
    traceback and exit with a non-zero code. In the library it is an ordinary ValueError. Keys in URLs are hidden.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*(hide_keys(argument) if isinstance(argument, str) else argument for argument in args))
