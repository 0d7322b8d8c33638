"""What tests of the library share."""

from collections.abc import Iterator

import pytest
from support.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A world of up to four ranks for the calls of a file."""
    with Pool(4) as ranks:
        yield ranks
