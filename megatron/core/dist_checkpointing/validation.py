"""Megatron-LM's names for how a load treats keys that only the request or only the checkpoint contains."""

from enum import Enum

from megatron.core.dist_checkpointing.planning import MismatchPolicy
from megatron.core.exceptions import UserError


class StrictHandling(Enum):
    """What to do about unexpected keys (requested, but not in the checkpoint) and missing keys (in the checkpoint, but
    requested by no rank).

    An unexpected key is an error or is left out of the result. Keys that are not an error are printed, except with
    IGNORE_ALL.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Unexpected keys are an error, missing keys are not."""
    LOG_UNEXPECTED = "log_unexpected"
    """No error."""
    LOG_ALL = "log_all"
    """No error."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Unexpected keys are an error, missing keys are not."""
    RAISE_ALL = "raise_all"
    """Both are errors."""
    RETURN_UNEXPECTED = "return_unexpected"
    """No error; unexpected keys are returned."""
    RETURN_ALL = "return_all"
    """No error; missing and unexpected keys are returned."""
    IGNORE_ALL = "ignore_all"
    """No error, and nothing is printed."""

    @property
    def policy(self) -> MismatchPolicy:
        """The policy for `reading.load_folder`."""
        raises = StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL
        return MismatchPolicy(missing=self not in raises, unused=self is not StrictHandling.RAISE_ALL)

    @property
    def returns(self) -> bool:
        """Whether a load also returns the keys."""
        return self in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Returns the member with this name or value. Raises UserError for other words."""
    if isinstance(strict, StrictHandling):
        return strict
    for member in StrictHandling:
        if strict in (member.value, member.name):
            return member
    words = ", ".join(member.value for member in StrictHandling)
    raise UserError(f"strict={strict!r}: unknown; choose from {words}")
