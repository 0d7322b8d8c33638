"""Scales of experts: which rows share one. Over ranks: tests/parity/test_fp8.py."""

import dataclasses

import pytest
import torch

from megatron.core.ops.fp8.block_recipes import build_scaling
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.grouped import Segments
from megatron.core.ops.fp8.micro_batches import MicroBatches
from megatron.core.ops.fp8.recipes import DelayedScaling, Fp8Settings, LinearSplit, Role
from megatron.core.ops.moe.grouped_linear import RowGroups

SETTINGS = Fp8Settings("tensorwise", FORMATS["hybrid"])
GROUPS = RowGroups.of_sources(torch.tensor([[2, 1], [3, 2], [1, 4]]))  # two experts, three sources


def test_sources_of_one_micro_batch_share_the_largest_value() -> None:
    amax = torch.tensor([1.0, 5.0, 2.0, 7.0, 3.0, torch.nan])
    assert MicroBatches((0, 1, 2)).largest(amax) is amax
    shared = MicroBatches((0, 1, 0)).largest(amax)
    assert shared[:3].tolist() == [2.0, 5.0, 2.0]
    assert shared[4] == 3.0 and shared[3].isnan() and shared[5].isnan()  # NaN must reach the loss
    columns = MicroBatches((0, 0, 1)).largest(torch.arange(12.0).view(6, 2))
    assert columns.tolist() == [[2, 3], [2, 3], [4, 5], [8, 9], [8, 9], [10, 11]]


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [("tensorwise", (6,)), ("blockwise", (6 * 128, 1))],  # blocks: each segment has one, padded
)
def test_factors_of_rows(recipe: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(13, 32)
    settings = dataclasses.replace(SETTINGS, recipe=recipe)
    scaling = build_scaling(settings, LinearSplit(), x.device, MicroBatches((0, 1, 2)))
    segments = Segments.of_rows(GROUPS, 13)
    pair = scaling.quantize(x, Role.GRADIENTS, segments, rows=True, columns=True, records=True)
    assert pair.rows is not None and pair.rows.factors.shape == shape
    assert pair.rows.values.dtype is torch.float8_e5m2


def test_delayed_scaling_has_one_scale_for_all_experts() -> None:
    settings = dataclasses.replace(SETTINGS, recipe="delayed", history_len=2)
    x, segments = torch.randn(13, 32), Segments.of_rows(GROUPS, 13)
    scaling = build_scaling(settings, LinearSplit(), x.device, MicroBatches((0, 1, 2)))
    assert isinstance(scaling, DelayedScaling)
    first = scaling.quantize(x, Role.INPUTS, segments, rows=True, columns=False, records=True).rows
    assert first is not None and first.scope == "segments"  # as tensorwise, as long as there is no history
    scaling.quantize(2 * x, Role.INPUTS, segments, rows=True, columns=False, records=False)
    seen = scaling.take_seen()
    assert seen.tolist() == [float(x.abs().max()), 0.0, 0.0]
    scaling.add_step(seen)
    second = scaling.quantize(3 * x, Role.INPUTS, segments, rows=True, columns=True, records=True)
    assert second.rows is not None and second.columns is not None and second.rows.scope == "all"
    torch.testing.assert_close(second.rows.factors, x.abs().max() / 448)
    assert scaling.take_seen()[0] == (3 * x).abs().max()
