"""The causal convolution against torch's."""

import torch
import torch.nn.functional as F

from megatron.core.ops.causal_conv import causal_conv


def test_it_is_torchs_depthwise_convolution() -> None:
    for length, taps in ((7, 4), (2, 4), (5, 1)):
        x, w, b = (torch.randn(shape, dtype=torch.float64) for shape in ((length, 2, 3), (3, taps), (3,)))
        expected = F.conv1d(x.permute(1, 2, 0), w[:, None], b, padding=taps - 1, groups=3)[..., :length]
        torch.testing.assert_close(causal_conv(x, w, b), expected.permute(2, 0, 1), rtol=1e-12, atol=1e-12)


def test_documents_do_not_see_each_other() -> None:
    x, w = torch.randn(9, 1, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    lengths = [2, 1, 6]
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    alone = torch.cat([causal_conv(part, w) for part in x.split(lengths)])
    torch.testing.assert_close(causal_conv(x, w, document=document), alone, rtol=0, atol=0)


def test_half_types_are_rounded_once() -> None:
    x, w = torch.randn(33, 2, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    found, wanted = causal_conv(x, w), causal_conv(x.double(), w.double())
    assert found.dtype is torch.bfloat16
    assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all()
