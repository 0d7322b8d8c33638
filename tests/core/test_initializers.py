"""Initial values: any range of any box is drawn by itself, and the distributions are those of torch's functions."""

import math

import pytest
import torch
from torch import nn

from megatron.core.counter_rng import stream_key
from megatron.core.initializers import (
    Constant,
    LogUniform,
    Normal,
    Uniform,
    XavierUniform,
    each_of,
    init_method_normal,
    scaled_init_method_normal,
)
from megatron.core.parameters import Box, ParameterInfo, draw_range


@pytest.mark.parametrize(
    "init", [Normal(0.1), Uniform(-2.0, 1.0), LogUniform(1.0, 4.0), XavierUniform(), Constant(2.0), nn.init.orthogonal_]
)
@pytest.mark.parametrize("box", [Box((0, 2, 0), (2, 3, 5)), Box((1, 0, 0), (1, 8, 5)), Box((0, 1, 2), (2, 4, 2))])
def test_any_flat_range_of_any_box_is_drawn_by_itself(init: object, box: Box) -> None:
    shape = (2, 8, 5)
    key = stream_key(7, "w")
    whole = torch.empty(80)
    draw_range(whole, ParameterInfo(shape, Box.whole(shape), init, name="w"), 0, key)  # type: ignore[arg-type]
    part = tuple(slice(start, start + extent) for start, extent in zip(box.start, box.shape, strict=True))
    expected = whole.view(shape)[part].reshape(-1)
    info = ParameterInfo(shape, box, init, name="w")  # type: ignore[arg-type]
    for first, stop in ((0, box.numel), (3, 7), (box.numel - 2, box.numel)):
        drawn = torch.empty(stop - first)
        draw_range(drawn, info, first, key)
        assert torch.equal(drawn, expected[first:stop])


@pytest.mark.parametrize(
    ("init", "shape"),
    [
        *((init, (200, 40)) for init in (Normal(0.3), XavierUniform(), Constant(2.0))),
        (XavierUniform(stacked=1), (4, 50, 40)),
    ],
)
def test_values_have_the_distribution_of_torchs_function(init: Normal, shape: tuple[int, ...]) -> None:
    """`values`, which draws by counters, and `__call__`, which draws with torch, agree in mean, deviation and range."""
    index = torch.arange(math.prod(shape))
    ours = init.values(index, stream_key(1, "w"), shape)
    torch.manual_seed(1)
    theirs = init(torch.empty(shape, dtype=torch.float64))
    for measure in (torch.Tensor.mean, torch.Tensor.std):
        assert abs(measure(ours) - measure(theirs)) <= 0.03 * theirs.std()
    if not isinstance(init, Normal):
        assert abs(ours.max() - theirs.max()) <= 0.01 * theirs.max() and abs(ours.min() - theirs.min()) < 0.01


def test_each_tensor_of_a_stack_is_a_matrix_of_its_own() -> None:
    assert each_of(Normal(1.0)) == Normal(1.0) and each_of(XavierUniform()) == XavierUniform(stacked=1)
    stack = each_of(nn.init.orthogonal_)(torch.empty(3, 2, 4, 8))
    for matrix in stack.view(3, 8, 8):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(8))


def test_megatron_lms_names() -> None:
    assert init_method_normal(0.3) == Normal(0.3)
    assert scaled_init_method_normal(0.3, 8) == Normal(0.3 / 4.0)
