"""Fixtures of the tests that train."""

import pytest
from support.runs import write_documents


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a small corpus of uneven documents."""
    return write_documents(tmp_path_factory.mktemp("corpus") / "text")
