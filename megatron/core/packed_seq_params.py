"""PackedSeqParams: Megatron-LM's record of the boundaries of packed documents."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass
class PackedSeqParams:
    """The boundaries of documents that are concatenated in a batch of one row ("thd" layout).

    Layers use `megatron.core.tokens.Tokens` instead; a model takes either.
    """

    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    """int32 [documents + 1], from 0 to the number of tokens."""
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: ProcessGroup | None = None
