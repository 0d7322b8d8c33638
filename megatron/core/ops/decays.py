"""Sums of logarithms of decays, which the chunks of recurrences need."""

import torch
from torch import Tensor


def sums_between(log_decay: Tensor) -> Tensor:
    """Returns the sum of log_decay [..., l] after each token m until each token l, [..., l, m]; 0 for m >= l.

    A difference of two sums from the start would lose digits: sums reach -1000 within a chunk, and neighbours differ by
    little (Dao and Gu 2024, arXiv:2405.21060, section 6.2, `segsum`).
    """
    size = log_decay.shape[-1]
    after = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    return log_decay[..., :, None].expand(*log_decay.shape, size).masked_fill(~after, 0.0).cumsum(-2)
