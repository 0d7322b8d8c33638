"""Sparse attention on a GPU: scores of the indexer, and attention to the keys that it selects."""

import pytest
from support import selected_keys

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", ["scores", "masks"])
def test_the_kernels_agree_with_their_definitions(check: str) -> None:
    getattr(selected_keys, check)()
