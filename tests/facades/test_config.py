"""The switch of experimental features keeps what it was set to."""

from megatron.facades.config import is_experimental_enabled, set_experimental_flag


def test_the_switch() -> None:
    assert not is_experimental_enabled()
    set_experimental_flag(True)
    assert is_experimental_enabled()
    set_experimental_flag(False)
