"""The exception for mistakes of users."""


class UserError(ValueError):
    """A mistake of the user: in a flag, a file or a call.

    The message names it and says what would work. Entry points (tools, pretrain_*.py) print the message without a
    traceback and exit with a non-zero code. In the library it is an ordinary ValueError.
    """
