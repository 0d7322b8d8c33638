"""Cross entropy over a vocabulary that is split over the tensor parallel ranks."""

from torch import Tensor

from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.process_groups_config import default_collection
from megatron.core.tensor_parallel.storage import check_group


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Loss of each token: logits [s, b, vocabulary of this rank] and labels [s, b] -> [s, b], in the wider of float32
    and the logits' type. A negative label marks a token without a loss."""
    check_group(default_collection().tp)
    columns = vocab_parallel_logits.shape[-1]
    loss = cross_entropy(
        vocab_parallel_logits.reshape(-1, columns), target.reshape(-1), label_smoothing=label_smoothing
    )
    return loss.view(target.shape)
