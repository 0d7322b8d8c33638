"""Cross entropy over a vocabulary that is split over the tensor parallel ranks."""

from torch import Tensor

from megatron.core.collectives import Group
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.process_groups_config import default_collection


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
    is the whole vocabulary without padding (None: no padding), `tp_group` the ranks that share it (None: the default
    tensor parallel group)."""
    group = tp_group if tp_group is not None else default_collection().tp
    logits = vocab_parallel_logits.flatten(0, -2)  # [t, columns]
    loss = cross_entropy(logits, target.flatten(), vocab_size, label_smoothing=label_smoothing, group=group)
    return loss.view(target.shape)
