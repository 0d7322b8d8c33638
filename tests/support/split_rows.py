"""One batch, and the loss of a rank's part of it, for tests of context parallelism."""

import torch
from torch import Tensor

from megatron.core.context_parallel import cut_rows, sequence_part
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.models.gpt import GPTModel
from megatron.core.tokens import RngPosition, Tokens

VOCABULARY, ROW, ROWS = 37, 16, 2
_EDGES = [0, 5, 6, 17, 30, ROW * ROWS]
"""Ends of documents in the packed batch (rows end to end). One document spans the end of a row."""


def loss_of_part(model: GPTModel, groups: ProcessGroupCollection | None, packed: bool) -> Tensor:
    """Returns the weighted sum of losses of this rank's tokens (without groups: of all) after its backward."""
    part = None if groups is None else sequence_part(groups)
    generator = torch.Generator().manual_seed(1)
    shape = (1, ROW * ROWS) if packed else (ROWS, ROW)
    ids, labels = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
    weight = torch.rand(shape, dtype=torch.float64, generator=generator)
    if part is not None:
        ids, labels, weight = (cut_rows(tensor, part, 1) for tensor in (ids, labels, weight))
    tokens = Tokens(
        seq_length=ids.shape[1],
        batch_size=ids.shape[0],
        part=part,
        cu_seqlens=torch.tensor(_EDGES, dtype=torch.int32) if packed else None,
        max_seqlen=13 if packed else None,
        sample_length=ROW,
        random=RngPosition(7, 3, 5),
    )
    loss = (model(ids, labels=labels, tokens=tokens) * weight).sum()
    loss.backward()
    return loss.detach()
