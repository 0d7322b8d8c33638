"""The kernels of the gated delta rule on a GPU: every published width, packed documents, long rows, equal bits."""

import pytest
from support import delta_rule_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", ["rows", "packed", "published_widths", "long_rows", "the_same_bits_again"])
def test_the_kernels_agree_with_their_definition(check: str) -> None:
    getattr(delta_rule_kernels, check)()
