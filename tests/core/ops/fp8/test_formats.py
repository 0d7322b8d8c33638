"""Formats of fp8 and scales."""

import pytest
import torch

from megatron.core.ops.fp8.formats import FORMATS, cast, largest_finite, scale_for

TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def test_the_formats_of_the_flag() -> None:
    assert (FORMATS["e4m3"].inputs, FORMATS["e4m3"].gradients) == (TYPES[0], TYPES[0])
    assert (FORMATS["hybrid"].inputs, FORMATS["hybrid"].gradients) == TYPES
    assert [largest_finite(dtype) for dtype in TYPES] == [448.0, 57344.0]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_cast_is_torchs_within_the_range(dtype: torch.dtype) -> None:
    limit = largest_finite(dtype)
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-8, 2, 20_000)
    values = values.clamp(-limit, limit)
    assert torch.equal(cast(values, dtype).view(torch.uint8), values.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_cast_limits_large_values_and_shows_what_is_not_finite(dtype: torch.dtype) -> None:
    limit = largest_finite(dtype)
    values = torch.tensor([limit * 1.5, -limit * 100, torch.inf, -torch.inf, torch.nan])
    found = cast(values, dtype).float()
    assert found[:2].tolist() == [limit, -limit] and bool(found[2:].isnan().all())


def test_scales() -> None:
    amax = torch.tensor([448.0, 7.0, 0.0, 1e-44])
    assert scale_for(amax, TYPES[0]).tolist() == [1.0, 64.0, 1.0, torch.finfo(torch.float32).max]
    assert scale_for(amax[:2], TYPES[0], margin=1).tolist() == [0.5, 32.0]
    bad = scale_for(torch.tensor([torch.inf, torch.nan]), TYPES[0])
    assert bad[0] == 0.0 and bool(bad[1].isnan())
