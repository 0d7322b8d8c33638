"""Sizes of tiles and grids, computed on the host. Triton has functions of the same names that kernels can call too, and
a call of those costs the host microseconds, several times for each launch. So does a question about a GPU."""

import functools
import math

import torch


def cdiv(count: int, size: int) -> int:
    """Returns how many tiles of `size` cover `count` elements: the quotient, rounded up."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Returns the smallest power of two that is not less than `count`; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0


def common_alignment(*strides: int) -> int:
    """Returns the largest power of two, at most 8, that divides all strides. Triton knows of a stride only whether 16
    divides it. Without this number a kernel loads elements of 2 bytes one by one if 16 does not."""
    return math.gcd(8, *strides)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)
