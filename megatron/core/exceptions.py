"""The one exception that is meant for the person at the keyboard."""


class UserError(ValueError):
    """Something the user gave is wrong: a flag, a file, a line.

    The message names it and says what would work. Entry points (tools, pretrain_*.py) print the message without a
    traceback and exit with a non-zero code; library callers see an ordinary ValueError.
    """
