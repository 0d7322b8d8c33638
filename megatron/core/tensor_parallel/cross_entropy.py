"""Cross entropy over a vocabulary that is split over the tensor parallel ranks."""

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group, all_reduce, group_size
from megatron.core.groups.defaults import tp_group_or_default
from megatron.core.ops.cross_entropy import cross_entropy, vocabulary_part
from megatron.core.ops.precision import at_least_float32
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    vocab_size: int | None = None,
    tp_group: Group = None,
) -> Tensor:
    """Returns the loss of each token [s, b], in the wider of float32 and the logits' type, for logits [s, b, this
    rank's vocabulary] and labels [s, b]. A negative label marks a token without a loss. Our own keywords: `vocab_size`
    is the whole vocabulary without padding (None: no padding but columns of -inf, as a model's logits have), `tp_group`
    the ranks that share it (None: the default tensor parallel group)."""
    group = tp_group_or_default(tp_group)
    logits = vocab_parallel_logits.flatten(0, -2)  # [t, columns]
    if label_smoothing and vocab_size is None and group_size(group) > 1:
        loss = cross_entropy(logits, target.flatten(), group=group)
        loss = loss + label_smoothing * _label_minus_mean(logits, target.flatten(), group)
    else:
        loss = cross_entropy(logits, target.flatten(), vocab_size, label_smoothing=label_smoothing, group=group)
    return loss.view(target.shape)


def _label_minus_mean(logits: Tensor, labels: Tensor, group: Group) -> Tensor:
    """Returns the label's logit minus the mean logit of the columns that are not -inf, [t], for logits [t, columns] and
    labels [t]; 0 for a negative label. Label smoothing e adds e times this to the loss."""
    real = ~torch.isneginf(logits).all(dim=0)  # [columns]
    count = all_reduce(real.sum(), group)
    wide = at_least_float32(logits.dtype)
    mean = torch.where(real, logits, 0.0).sum(dim=-1, dtype=wide) / count
    label, here = vocabulary_part(logits.shape[-1], None, group).local(labels)
    chosen = torch.where(here, logits.gather(-1, label[:, None])[:, 0], 0.0)
    difference = reduce_from_tensor_model_parallel_region(chosen - mean, group)
    return torch.where(labels >= 0, difference, 0.0)
