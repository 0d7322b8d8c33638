"""The largest attention logit of each head, for --log-max-attention-logit and --qk-clip.

Fused kernels do not return it: they keep the sum of the exponentials only. So the scores are computed once more, in
blocks of queries, without gradients. This costs as many operations as one of attention's two forward products; causal
attention skips the keys after a block.
"""

import torch
from torch import Tensor

from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, hidden_keys
from megatron.core.ops.precision import widened

SCORES_AT_ONCE = 1 << 25
"""Largest number of scores of one block of queries."""


@torch.no_grad()
def max_attention_logits(query: Tensor, key: Tensor, variant: AttentionVariant, call: AttentionCall) -> Tensor:
    """Returns the largest scale q k of each head over all queries and the keys that they see: query [sq, b, a, d], key
    [sk, b, g, d] -> [a], in float32 at least; -inf for a head without any visible key.

    The logits are taken before the soft cap, ALiBi and other biases, so only the weights of queries and keys determine
    them.
    """
    sq, b, a, d = query.shape
    sk, _, g, _ = key.shape
    rows = max(1, SCORES_AT_ONCE // (b * a * sk))
    in_order = call.query_positions is None and variant.reach[1] == 0
    largest = widened(query.new_full((a,), -torch.inf))
    keys = key.permute(1, 2, 3, 0)  # [b, g, d, sk]
    for first in range(0, sq, rows):
        block = query[first : first + rows]
        count = len(block)
        heads = (block * variant.scale).permute(1, 2, 0, 3).reshape(b, g, -1, d)  # [b, g, a/g * rows, d]
        hidden = hidden_keys(variant, call, first, count, sq, sk, query.device)
        seen = min(sk, max(1, first + count + sk - sq)) if in_order else sk
        scores = (heads @ keys[..., :seen]).view(b, a, count, seen)
        if hidden is not None:
            scores = scores.masked_fill(hidden[..., :seen] if hidden.shape[-1] > 1 else hidden, -torch.inf)
        largest = torch.maximum(largest, widened(scores.amax((0, 2, 3))))
    return largest
