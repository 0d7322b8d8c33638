"""What a load does about keys that are on one side only, under the published words."""

from enum import Enum

from megatron.core.dist_checkpointing.planning import Tolerance
from megatron.core.exceptions import UserError


class StrictHandling(Enum):
    """Unexpected keys are requested and not in the checkpoint; missing ones are in it and requested by no rank.

    An unexpected key cannot be loaded: it is an error, or it is left out of what a load returns. Whatever is tolerated
    is printed, but for IGNORE_ALL.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """An unexpected key is an error, missing ones are not."""
    LOG_UNEXPECTED = "log_unexpected"
    """No error."""
    LOG_ALL = "log_all"
    """No error."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """An unexpected key is an error, missing ones are not."""
    RAISE_ALL = "raise_all"
    """Both are errors."""
    RETURN_UNEXPECTED = "return_unexpected"
    """No error; unexpected keys are returned."""
    RETURN_ALL = "return_all"
    """No error; missing and unexpected keys are returned."""
    IGNORE_ALL = "ignore_all"
    """No error, and no word."""

    @property
    def tolerance(self) -> Tolerance:
        """The same in the words of a load."""
        raises = StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL
        return Tolerance(missing=self not in raises, unused=self is not StrictHandling.RAISE_ALL)

    @property
    def returns(self) -> bool:
        """A load returns the keys beside the state dict."""
        return self in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """The member of a name or value. Raises UserError for another word."""
    if isinstance(strict, StrictHandling):
        return strict
    for member in StrictHandling:
        if strict in (member.value, member.name):
            return member
    words = ", ".join(member.value for member in StrictHandling)
    raise UserError(f"strict={strict!r}: there is no such handling; there are: {words}")
