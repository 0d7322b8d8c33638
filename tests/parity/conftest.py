"""A pool of eight processes for all cells that a pytest worker runs."""

from collections.abc import Iterator

import pytest
from parity.cells import WORLD
from support.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(WORLD) as pool:
        yield pool
