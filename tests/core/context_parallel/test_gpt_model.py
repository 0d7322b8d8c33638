"""A whole model over context parallel ranks against one process, and what goes over the wire."""

from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.split_rows import ROW, ROWS, VOCABULARY, loss_of_part
from support.tiny_models import randomize, tiny_config, tiny_gpt
from torch import Tensor

from megatron.core.communication.traffic import Traffic, recorded
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.parameters import info_of
from megatron.core.tokens import Tokens
from megatron.core.transformer.kernels_in_use import attention_of_layer

WAYS = ["p2p", "a2a", "a2a+p2p"]


def gpt(groups: ProcessGroupCollection, **settings: Any) -> GPTModel:
    config = tiny_config(num_layers=4, **settings)
    model = tiny_gpt(config, VOCABULARY, ROW * ROWS, position_embedding_type="rope", pg_collection=groups)
    randomize(model)
    return model


def gradients(groups: ProcessGroupCollection, packed: bool = False, **settings: Any) -> dict[str, Tensor]:
    """The sum of the losses of this rank's tokens, and its gradients."""
    model = gpt(groups, **settings)
    loss = loss_of_part(model, groups, packed)
    found = {info_of(p).name: p.grad for p in model.parameters() if p.grad is not None}
    return {"loss": loss, **found}


def traffic_on_rank() -> tuple[dict[str, list[Traffic]], str, str]:
    groups = ProcessGroupCollection.from_grid(
        RankGrid(4, context=4), torch.distributed.get_rank(), hierarchical_context_sizes=[2, 2]
    )
    logs = {}
    for way in WAYS:
        with recorded() as logs[way]:
            gradients(groups, cp_comm_type=[way] * 4)
    with recorded() as logs["window"]:
        gradients(groups, cp_comm_type="p2p", window_size=(1, 0))
    described = gpt(groups, cp_comm_type="p2p").decoder.layers[0].self_attention.core_attention
    with pytest.raises(UserError, match=r"tokens.part is None, but this rank holds SequencePart\(rank="):
        gpt(groups)(torch.zeros(1, 4, dtype=torch.int64), tokens=Tokens(4, 1))
    with pytest.raises(UserError, match="attention_mask for 5 queries and 16 keys"):
        gpt(groups)(torch.zeros(1, 4, dtype=torch.int64), attention_mask=torch.ones(5, 16, dtype=torch.bool))
    cpu = torch.device("cpu")
    described.config.attention_dropout = 0.0
    return (
        logs,
        attention_of_layer(described, cpu).why,
        attention_of_layer(described, torch.device("cuda"), packed=True).why,
    )


@pytest.mark.slow
def test_traffic() -> None:
    """Bytes of four layers, forward and backward: keys twice, their gradients once."""
    ranks = run_on_ranks(traffic_on_rank, 4)
    chunk = ROW // 8 * ROWS * 2 * 16 * 8 * 4  # keys and values of a chunk, [rows, h] in float64, in all layers

    def sent(rank: int, way: str) -> float:
        return sum(entry.sent_bytes for entry in ranks[rank][0][way])

    for rank in range(4):
        # To later ranks goes the first chunk, to earlier ones both; gradients come back the same ways.
        forward, back = (3 - rank) + 2 * rank, rank + 2 * (3 - rank)
        assert sent(rank, "p2p") == chunk * (2 * forward + back)
        # Queries, keys, values and outputs are two chunks' worth of keys and values, of which 3/4 go to other ranks.
        assert sent(rank, "a2a") == chunk * 2 * 2 * 2 * 3 / 4
        assert {entry.operation for entry in ranks[rank][0]["a2a+p2p"]} == {"all_to_all", "send", "receive"}
        assert sent(rank, "window") < sent(rank, "p2p") / 3
        assert {entry.dtype for log in ranks[rank][0].values() for entry in log} == {torch.float64}
    assert ranks[0][1] == "p2p over 4 ranks (all keys gathered where there is an attention mask), plain torch in blocks"
    assert ranks[0][2] == (
        "p2p over 4 ranks (all keys gathered where there is an attention mask), plain torch in blocks, because "
        "attention in blocks (cuDNN, flash) computes in half precision, not in float64 (--bf16 is faster)"
    )
