"""Fills masked tokens with a bidirectional model."""

from collections.abc import Sequence

import torch

from megatron.core.inference.generation import fill_up
from megatron.core.models.bert.bert_model import BertModel


@torch.no_grad()
def fill_masks(model: BertModel, rows: Sequence[Sequence[int]], mask: int) -> list[list[int]]:
    """Returns the rows of token ids with every id `mask` replaced by the model's most likely token. All masks of a row
    are filled in one forward pass, and the result of a row does not depend on the other rows. The model must be in
    evaluation mode and not split over ranks."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(row) for row in rows])
    ids = fill_up(rows)
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    types = torch.zeros_like(ids).to(device) if model.num_tokentypes else None
    logits, _ = model(ids.to(device), real.to(device), types)
    logits[..., mask] = -torch.inf  # a mask does not fill a mask
    likely = logits.argmax(-1).cpu()  # [b, s]
    filled = torch.where(ids == mask, likely, ids).tolist()
    return [row[:length] for row, length in zip(filled, lengths.tolist(), strict=True)]
