"""Operations of the lightning indexer of DeepSeek sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2): scores of keys,
the choice of the best keys of each query, and the loss that trains the scores.

Queries are processed in blocks, so no [b, heads, s, sk] tensor is ever kept.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.communication.collectives import Group, all_reduce
from megatron.core.ops.attention.unfused import SCORES_AT_ONCE
from megatron.core.ops.precision import widened
from megatron.core.ops.records import ByDevice
from megatron.core.utils.autograd_context import AutogradContext

HiddenKeys = Callable[[int, int], Tensor]
"""(first query, number of queries) -> which keys they do not see: bool that broadcasts to [b, queries, sk]."""


def index_scores(query: Tensor, key: Tensor, weight: Tensor, relu: bool = True) -> Tensor:
    """Returns I(t, s) = sum over heads j of w(t, j) relu(q(t, j) . k(s)) for query [s, b, j, d], key [sk, b, d] and
    weight [s, b, j]: [b, s, sk], in float32 at least. Without `relu` the products are not clamped."""
    products = torch.einsum("sbjd,tbd->bsjt", widened(query), widened(key))
    products = products.relu() if relu else products
    return torch.einsum("bsjt,sbj->bst", products, widened(weight))


@torch.no_grad()
def unselected_keys(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    hidden: HiddenKeys,
    topk: int,
    relu: bool = True,
    scores_of: Callable[..., Tensor] = index_scores,
) -> Tensor:
    """Returns which keys attention leaves out: bool [b, 1, s, sk]. Each query keeps the `topk` keys with the largest
    scores of those it sees, or all if it sees fewer. Of keys with equal scores it keeps the earlier ones. `scores_of`
    computes `index_scores`."""
    compute = scores_of.chosen_for(query) if isinstance(scores_of, ByDevice) else scores_of
    blocks = []
    for first, rows in _blocks(query, key, query.shape[2] if compute is index_scores else 1):
        block = slice(first, first + rows)
        scores = compute(query[block], key, weight[block], relu)
        unseen = hidden(first, rows).expand(scores.shape)
        blocks.append(~_best(scores.masked_fill_(unseen, -torch.inf), topk) | unseen)
    return torch.cat(blocks, 1)[:, None]


def _best(scores: Tensor, count: int) -> Tensor:
    """Returns which scores [..., sk] are the `count` largest of their row, of equal ones the earlier."""
    least = scores.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = ~(scores <= least), scores == least
    room = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))


def indexer_loss(
    index: tuple[Tensor, Tensor, Tensor],
    attention: tuple[Tensor, Tensor, float],
    hidden: HiddenKeys,
    relu: bool = True,
    tp_group: Group = None,
) -> Tensor:
    """Returns the sum over queries of KL(p || softmax(I)), where p is the mean of attention's probabilities over the
    heads of all ranks of `tp_group`. Both are distributions over the keys that are not hidden.

    `index`: query, key and weight of `index_scores`. `attention`: query [s, b, a, d] and key [sk, b, a, d] of this
    rank's heads, and the factor of their scores; they get no gradient. All ranks return the same. Gradients are
    computed in forward, block by block, so that nothing of the size of the scores is kept.
    """
    return _IndexerLoss.apply(*index, *attention, hidden, relu, tp_group)


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        query: Tensor,
        key: Tensor,
        weight: Tensor,
        attention_query: Tensor,
        attention_key: Tensor,
        scale: float,
        hidden: HiddenKeys,
        relu: bool,
        tp_group: Group,
    ) -> Tensor:
        total = widened(query).new_zeros(())
        key = key.detach().requires_grad_()
        gradients: tuple[list[Tensor], list[Tensor]] = ([], [])
        of_key = torch.zeros_like(widened(key))
        heads = max(query.shape[2], attention_query.shape[2])
        for first, rows in _blocks(query, key, heads):
            block = slice(first, first + rows)
            unseen = hidden(first, rows)
            target = _mean_probabilities(attention_query[block], attention_key, scale, unseen, tp_group)
            parts = [tensor[block].detach().requires_grad_() for tensor in (query, weight)]
            with torch.enable_grad(), saved_tensors_hooks(_unchanged, _unchanged):
                scores = index_scores(parts[0], key, parts[1], relu)
                log_chosen = scores.masked_fill(unseen, torch.finfo(scores.dtype).min).log_softmax(-1)
                loss = (torch.xlogy(target, target) - target * log_chosen).sum()
            of_query, of_weight, of_keys = torch.autograd.grad(loss, [*parts, key])
            total += loss.detach()
            of_key += of_keys
            gradients[0].append(of_query)
            gradients[1].append(of_weight)
        ctx.save_for_backward(torch.cat(gradients[0]), of_key.to(key.dtype), torch.cat(gradients[1]))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = (saved * gradient.to(saved.dtype) for saved in ctx.saved_tensors)
        return *found, None, None, None, None, None, None


def _unchanged(tensor: Tensor) -> Tensor:
    """Returns the tensor unchanged. As a pair of saved-tensor hooks, it protects a graph that is built within forward
    from the hooks of recomputation, which would run the recomputed function again."""
    return tensor


def _mean_probabilities(query: Tensor, key: Tensor, scale: float, hidden: Tensor, tp_group: Group) -> Tensor:
    """Returns the mean over all heads of softmax(scale q k^T) over the keys that are not hidden: [b, queries, sk]."""
    scores = torch.einsum("sbad,tbad->bast", widened(query) * scale, widened(key))
    scores = scores.masked_fill(hidden[..., None, :, :], torch.finfo(scores.dtype).min)
    summed = all_reduce(scores.softmax(-1).sum(1), tp_group)
    return summed / summed.sum(-1, keepdim=True)


def _blocks(query: Tensor, key: Tensor, heads: int) -> list[tuple[int, int]]:
    """Returns (first query, number of queries) of each block."""
    length = query.shape[0]
    rows = max(1, SCORES_AT_ONCE // (query.shape[1] * heads * key.shape[0]))
    return [(first, min(rows, length - first)) for first in range(0, length, rows)]
