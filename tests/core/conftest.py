"""What tests of the library share."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """A world of up to four ranks for the calls of a file."""
    from support.pool import Pool  # after tests/conftest.py has set the environment, which the ranks get

    with Pool(4) as ranks:
        yield ranks
