"""Dropout masks on a CPU: `dropout.keep_rows`, compiled by numba."""

import numpy as np
import torch
from torch import Tensor

from megatron.core.ops.dropout.dropout import Draw
from megatron.core.utils.compiled import compiled


def keep_rows_compiled(draw: Draw, row: Tensor, extra: Tensor, first: Tensor, count: int) -> Tensor:
    """Computes `dropout.keep_rows` for tensors on a CPU."""
    kept = torch.empty((row.shape[0], count), dtype=torch.bool)
    iteration, key_0, key_1, threshold = (
        np.uint64(word) for word in (int(draw.iteration) & 0xFFFFFFFF, *draw.key, draw.threshold)
    )
    rows = _unsigned(row), _unsigned(extra), _unsigned(first)
    fill = _fill_by_words if draw.bits == 32 else _fill_by_bits
    fill(kept.numpy(), *rows, iteration, key_0, key_1, threshold)
    return kept


def _unsigned(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().numpy().view(np.uint64)


@compiled
def _philox(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@compiled
def _fill_by_words(
    kept: np.ndarray,
    row: np.ndarray,
    extra: np.ndarray,
    first: np.ndarray,
    iteration: np.uint64,
    key_0: np.uint64,
    key_1: np.uint64,
    threshold: np.uint64,
) -> None:
    """Fills `kept` by numbers of 32 bits: column c = first + j has word c % 4 of block c // 4."""
    low = np.uint64(0xFFFFFFFF)
    count = kept.shape[1]
    blocks = count // 4 + 2  # all blocks that a row may need
    whole = np.empty(4 * blocks, dtype=np.bool_)
    for i in range(kept.shape[0]):
        start = first[i] >> np.uint64(2)
        for block in range(blocks):
            counter = (start + np.uint64(block)) & low
            words = _philox(row[i] & low, counter, iteration, extra[i] & low, key_0, key_1)
            for number in range(4):
                whole[4 * block + number] = words[number] >= threshold
        lane = np.int64(first[i] & np.uint64(3))
        kept[i, :] = whole[lane : lane + count]


@compiled
def _fill_by_bits(
    kept: np.ndarray,
    row: np.ndarray,
    extra: np.ndarray,
    first: np.ndarray,
    iteration: np.uint64,
    key_0: np.uint64,
    key_1: np.uint64,
    threshold: np.uint64,
) -> None:
    """Fills `kept` by numbers of 16 bits: column c = first + j has bit c % 32 of each of the 16 words of 4 blocks."""
    low, one = np.uint64(0xFFFFFFFF), np.uint64(1)
    count = kept.shape[1]
    for i in range(kept.shape[0]):
        start, lane = first[i] >> np.uint64(5), int(first[i] & np.uint64(31))
        for group in range((lane + count + 31) // 32):
            found, bit = low, np.uint64(0)
            for block in range(4):
                counter = ((start + np.uint64(group)) * np.uint64(4) + np.uint64(block)) & low
                words = _philox(row[i] & low, counter, iteration, extra[i] & low, key_0, key_1)
                for number in range(4):
                    found = found & words[number] if (threshold >> bit) & one else found | words[number]
                    bit += one
            begin = 32 * group - lane
            for j in range(max(begin, 0), min(begin + 32, count)):
                kept[i, j] = (found >> np.uint64(j - begin)) & one
