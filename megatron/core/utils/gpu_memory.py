"""Recognises errors that say that a GPU has no memory left."""

import re

import torch

SAYS_NO_GPU_MEMORY = re.compile(
    r"CUDA error: out of memory"  # the runtime
    r"|\[CUDA\]: out of memory"  # Triton
    r"|STATUS_ALLOC_FAILED"  # cuBLAS, cuDNN
    r"|Cuda failure[^\n]*out of memory|Failed to CUDA calloc"  # NCCL
)
"""What libraries say that ask for memory without torch."""


def is_lack_of_gpu_memory(error: BaseException) -> bool:
    """Returns whether torch, or a library that asks for memory itself, found no GPU memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and SAYS_NO_GPU_MEMORY.search(str(error)) is not None
