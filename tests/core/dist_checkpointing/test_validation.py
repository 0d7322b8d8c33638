"""Megatron-LM's words for missing and unexpected keys."""

import pytest

from megatron.core.dist_checkpointing.planning import MismatchPolicy
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag
from megatron.core.exceptions import UserError


def test_words_and_names_are_parsed() -> None:
    assert parse_strict_flag("raise_all") is parse_strict_flag("RAISE_ALL") is StrictHandling.RAISE_ALL
    with pytest.raises(UserError, match="strict='no': unknown; choose from assume_ok_unexpected, log_unexpected"):
        parse_strict_flag("no")


def test_policies() -> None:
    assert StrictHandling.RAISE_ALL.policy == MismatchPolicy()
    assert StrictHandling.ASSUME_OK_UNEXPECTED.policy == MismatchPolicy(unused=True)
    assert StrictHandling.LOG_ALL.policy == MismatchPolicy(missing=True, unused=True)
    assert [word for word in StrictHandling if word.returns] == [
        StrictHandling.RETURN_UNEXPECTED,
        StrictHandling.RETURN_ALL,
    ]
