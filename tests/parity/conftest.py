"""One world of eight processes for all cells."""

from collections.abc import Iterator

import pytest
from parity.cells import WORLD
from support.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(WORLD, seconds=100.0) as pool:
        yield pool
