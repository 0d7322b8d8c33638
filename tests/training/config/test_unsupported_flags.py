"""The names of unsupported flags."""

from megatron.training.config.flag_table import flags_by_spelling
from megatron.training.config.retired import REFUSED, RETIRED
from megatron.training.config.unsupported_flags import ACCEPTED_FLAGS, REFUSED_FLAGS

UNSUPPORTED_FLAGS = ACCEPTED_FLAGS.keys() | REFUSED_FLAGS.keys()


def test_no_flag_is_both_supported_and_unsupported() -> None:
    assert not UNSUPPORTED_FLAGS & (flags_by_spelling().keys() | RETIRED | REFUSED.keys())


def test_names_are_flags() -> None:
    assert all(name.startswith("--") and name == name.lower() for name in UNSUPPORTED_FLAGS)
