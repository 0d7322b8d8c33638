"""Random numbers as functions of a counter instead of a generator state.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) in integer torch operations: the
same bits on every device and for every way to split the work, and no state to save.
"""

import hashlib
import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Word = Tensor | int
"""A 32-bit word held in int64: a Python int, or a tensor that broadcasts against its siblings."""


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four independent uniform 32-bit words (int64 tensors in [0, 2^32)) for each element of the broadcast
    counter.

    At least one counter word is a tensor; words of the key may be, too. Words and keys are taken modulo 2^32.
    """
    device = next(word.device for word in counter if isinstance(word, Tensor))
    c0, c1, c2, c3 = (torch.as_tensor(word, dtype=torch.int64, device=device) & _MASK for word in counter)
    k0, k1 = key[0] & _MASK, key[1] & _MASK
    for _ in range(_ROUNDS):
        # The product wraps modulo 2^64 as two's complement, so shift and mask still give its upper and lower words.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def stream_key(seed: int, label: str) -> tuple[int, int]:
    """Returns the Philox key of a named stream: two words that depend on the seed and on every character of the
    label."""
    digest = hashlib.sha256(f"{seed}\0{label}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def standard_normal(index: Tensor, key: tuple[int, int]) -> Tensor:
    """Returns N(0, 1) values in float64, one for each element of `index` (int64, up to 2^63), by the Box-Muller
    transform of one Philox block each.

    Values are float64, so that rounding to the model's type removes the differences of log and cos between devices.
    """
    first, second, _, _ = philox((index, index >> 32, 0, 0), key)
    radius = torch.sqrt(-2.0 * torch.log((first.double() + 0.5) * 2.0**-32))
    return radius * torch.cos(second.double() * (2.0 * math.pi * 2.0**-32))


def uniform(index: Tensor, key: tuple[Word, Word]) -> Tensor:
    """Returns uniform values in the open interval (0, 1) in float64, one for each element of `index`. The words of the
    key may be tensors of the same shape, one key for each element."""
    return (philox((index, index >> 32, 0, 0), key)[0].double() + 0.5) * 2.0**-32
