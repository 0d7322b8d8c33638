"""Megatron-LM's switch for experimental features. No feature of this package depends on it."""


class _Switch:
    on = False


def set_experimental_flag(flag: bool) -> None:
    """Sets what `is_experimental_enabled` returns. Nothing else reads it."""
    _Switch.on = flag


def is_experimental_enabled() -> bool:
    """Returns what `set_experimental_flag` set; False before."""
    return _Switch.on
