"""Chunks of attention: each row or packed document is cut into pieces that do not see each other (Llama 4)."""

import torch
from torch import Tensor


def chunks_of_row(length: int, chunk: int, device: torch.device) -> Tensor:
    """Boundaries of the chunks of one row, int32, as `cu_seqlens` of documents. The last may be shorter."""
    count = -(-length // chunk)
    return (torch.arange(count + 1, dtype=torch.int32, device=device) * chunk).clamp(max=length)


def chunks_of_documents(cu_seqlens: Tensor, length: int, chunk: int) -> Tensor:
    """The same for documents that lie end to end in a row of `length`: chunks are counted from where each begins.

    How many there are is known on the device alone; so the result is as long as it can be, with empty chunks at the
    end."""
    index = torch.arange(length, device=cu_seqlens.device)
    start = cu_seqlens[torch.bucketize(index, cu_seqlens[1:], right=True)]
    begins = torch.where((index - start) % chunk == 0, index, length).sort().values
    at_most = min(length, cu_seqlens.numel() + -(-length // chunk))
    return torch.cat([begins[:at_most], begins.new_full((1,), length)]).to(torch.int32)
