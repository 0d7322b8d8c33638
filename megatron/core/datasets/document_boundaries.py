"""What the end-of-document tokens of a sample mean for attention, positions and loss."""

import numpy as np


def cumulative_lengths(tokens: np.ndarray, eod: int) -> np.ndarray:
    """int32 [documents + 1]: where each document of a sample begins, and the sample's length.

    A document ends with its end-of-document token; what follows the last one is a document too.
    """
    ends = np.flatnonzero(tokens == eod) + 1
    if len(ends) and ends[-1] == len(tokens):
        ends = ends[:-1]
    boundaries = np.empty(len(ends) + 2, np.int32)
    boundaries[0] = 0
    boundaries[1:-1] = ends
    boundaries[-1] = len(tokens)
    return boundaries


def restarted_positions(cu_seqlens: np.ndarray) -> np.ndarray:
    """int64 [s]: positions that start at 0 in each document."""
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    return np.arange(cu_seqlens[-1], dtype=np.int64) - np.repeat(starts, lengths)


def causal_mask(sequence_length: int) -> np.ndarray:
    """bool [1, s, s], True where attention is masked: everything later than the query."""
    return np.triu(np.ones((1, sequence_length, sequence_length), bool), k=1)


def document_mask(cu_seqlens: np.ndarray) -> np.ndarray:
    """As `causal_mask`, with other documents masked too."""
    document = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    return causal_mask(len(document)) | (document[:, None] != document[None, :])
