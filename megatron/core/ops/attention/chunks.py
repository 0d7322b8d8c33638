"""Chunked attention (Llama 4): each row or packed document is cut into chunks that do not see each other."""

import torch
from torch import Tensor


def chunks_of_row(length: int, chunk: int, device: torch.device) -> Tensor:
    """Returns the boundaries of the chunks of one row (int32, like `cu_seqlens`). The last chunk may be shorter."""
    count = -(-length // chunk)
    return (torch.arange(count + 1, dtype=torch.int32, device=device) * chunk).clamp(max=length)


def chunks_of_documents(cu_seqlens: Tensor, length: int, chunk: int) -> Tensor:
    """Returns the boundaries of the chunks of packed documents in a row of `length`. Each document starts a new chunk.

    The number of chunks is known on the device only, so the result has the largest possible length, with empty chunks
    at the end.
    """
    index = torch.arange(length, device=cu_seqlens.device)
    start = cu_seqlens[torch.bucketize(index, cu_seqlens[1:], right=True)]
    begins = torch.where((index - start) % chunk == 0, index, length).sort().values
    at_most = min(length, cu_seqlens.numel() + -(-length // chunk))
    return torch.cat([begins[:at_most], begins.new_full((1,), length)]).to(torch.int32)
