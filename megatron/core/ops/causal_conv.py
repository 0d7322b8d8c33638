"""Causal convolution of each channel along the sequence."""

import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.precision import widened


def causal_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, document: Tensor | None = None, silu: bool = False
) -> Tensor:
    """Returns y_t = bias + sum over j < k of weight[:, k - 1 - j] * x_(t - j), for x [s, b, ...] with c channels in the
    dimensions after the second, weight [c, k] and bias [c]: a depthwise convolution whose last tap is the token itself.
    Tokens before the row count as zeros. With `silu` it returns y sigmoid(y).

    `document` [s] is the number of each token's packed document; tokens of other documents count as zeros. Computed in
    float32 at least; the result has the type of the inputs.
    """
    length, taps = inputs.shape[0], weight.shape[1]
    padded = F.pad(widened(inputs.flatten(2)), (0, 0, 0, 0, taps - 1, 0))
    earlier = None if document is None else F.pad(document, (taps - 1, 0), value=-1)
    weight = widened(weight)
    total = None if bias is None else widened(bias)
    for tap in range(taps):
        term = padded[tap : tap + length] * weight[:, tap]
        if document is not None and earlier is not None and tap < taps - 1:
            term = term * earlier[tap : tap + length].eq(document)[:, None, None]
        total = term if total is None else total + term
    assert total is not None
    convolved = total.to(inputs.dtype).view(inputs.shape)
    return F.silu(convolved) if silu else convolved
