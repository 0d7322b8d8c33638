"""The states of Mamba-2 between chunks, in Triton's interpreter."""

import torch
import torch.nn.functional as F
from support.recurrent_kernels import documents, scan_arguments

from megatron.core.ops.ssd.recurrent import ssd_recurrent
from megatron.core.ops.ssd.states_triton import Sizes, states_before_chunks
from megatron.core.ops.ssd.steps_triton import sizes_and_sums


def test_states_before_chunks_are_those_of_the_recurrence() -> None:
    mixed, step, bias, log_rate, _ = scan_arguments(50, 1, 2, 2, 20, 6, torch.float32)
    step, document, sizes = step[..., :2], documents(20, 30), Sizes(50, 1, 2, 2, 20, 6, 16)
    steps, sums = sizes_and_sums(step, bias, log_rate, 0.0, 16)
    found = states_before_chunks(mixed, steps, sums, document, sizes, torch.float32)
    assert found.shape == (1, 4, 4, 16, 32) and not found[..., 6:, :].any() and not found[..., 20:].any()
    x, b, c = mixed.split([40, 6, 6], -1)
    given = x.reshape(50, 1, 4, 20), F.softplus(step.flatten(2) + bias), b, c
    for chunk in range(1, 4):
        heads, size, b_before, c_before = (tensor[: 16 * chunk].double() for tensor in given)
        before = size, -log_rate.double().exp(), b_before, c_before
        _, expected = ssd_recurrent(heads, *before, document[: 16 * chunk])
        torch.testing.assert_close(found[:, :, chunk, :6, :20].double(), expected, rtol=1e-5, atol=1e-5)


def test_tiles_cover_heads_and_states() -> None:
    for head_dim, state_dim, expected in ((8, 4, (16, 1, 16)), (64, 128, (64, 1, 128)), (96, 200, (64, 2, 256))):
        sizes = Sizes(9, 1, 1, 1, head_dim, state_dim, 64)
        assert (sizes.tile, sizes.parts, sizes.states) == expected
