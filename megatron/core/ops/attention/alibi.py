"""Slopes of ALiBi (Press et al. 2022): scores fall linearly with the distance, instead of position embeddings."""


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Returns 2^(-8 i / heads) for i = 1 ... heads. If `heads` is no power of two: the slopes of the next lower power,
    then every other slope of the next higher one."""
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / lower) for i in range(1, lower + 1)]
    slopes += [2.0 ** (-8.0 * i / (2 * lower)) for i in range(1, 2 * (heads - lower), 2)]
    return tuple(slopes)
