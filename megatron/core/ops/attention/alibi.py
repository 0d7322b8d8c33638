"""Slopes of ALiBi: attention without position embeddings, whose scores fall with the distance (Press et al. 2022)."""


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """2^(-8 i / heads) for i = 1 ... heads; where heads are no power of two, those of the next lower one and then every
    other one of the next higher."""
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / lower) for i in range(1, lower + 1)]
    slopes += [2.0 ** (-8.0 * i / (2 * lower)) for i in range(1, 2 * (heads - lower), 2)]
    return tuple(slopes)
