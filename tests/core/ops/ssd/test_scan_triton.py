"""The kernels of the scan of a Mamba-2 layer, in Triton's interpreter."""

import pytest
from support import recurrent_kernels

from megatron.core.ops.ssd import scan_triton


@pytest.mark.parametrize("check", ["scans", "scans_of_other_types"])
def test_the_kernels_agree_with_their_reference(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_triton, "_CHUNK", 16)
    getattr(recurrent_kernels, check)()
