"""What a planted bug is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A bug: in `file` (below megatron/), `before` becomes `after`. It must stand there exactly once."""

    name: str
    story: str
    """What is wrong, in words."""
    file: str
    before: str
    after: str
    caught_by: str
    quick: bool = False
    """Planted in every run of the tests, not only in the slow ones."""
