"""Muon's kernels on a GPU: symmetric products, orthogonal matrices and updates."""

import pytest
from support import muon_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "check",
    [
        "symmetric_products",
        "products_in_two_parts",
        "orthogonal_matrices",
        "matrices_of_several_shapes",
        "updates",
        "updates_of_runs",
    ],
)
def test_the_kernels_agree_with_their_definitions(check: str) -> None:
    getattr(muon_kernels, check)()
