"""Sizes of tiles and grids, computed on the host. Triton has functions of the same names that kernels can call too, and
a call of those costs the host microseconds, several times for each launch."""


def cdiv(count: int, size: int) -> int:
    """Returns how many tiles of `size` cover `count` elements: the quotient, rounded up."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Returns the smallest power of two that is not less than `count`; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0
