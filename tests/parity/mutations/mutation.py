"""Description of a planted bug."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A bug: in `file` (below megatron/) `before` is replaced by `after`. `before` must occur exactly once."""

    name: str
    story: str
    """What the bug does, in words."""
    file: str
    before: str
    after: str
    caught_by: str
    """Name of the cell that fails."""
    quick: bool = False
    """Planted in `make test`, not only in `make test-all`."""
