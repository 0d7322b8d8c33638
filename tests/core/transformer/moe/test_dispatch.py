"""What dispatchers have in common."""

import torch

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.ops.moe.permute import Copies
from megatron.core.transformer.moe.dispatch import first_rows
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

CONFIG = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=3)


def test_the_weight_of_a_copy_is_that_of_its_choice() -> None:
    at = MoEAlltoAllTokenDispatcher(CONFIG, ProcessGroupCollection.from_grid(RankGrid(1), 0))
    weights = torch.tensor([[0.5, 0.1], [0.2, 0.3]])
    copies, choice = at.backend.experts.number_choices(torch.tensor([[2, 0], [0, 1]]), 3).copies(4)
    assert copies.source.tolist() == [0, 1, 1, 0]
    assert at.weights_of(weights, copies, choice).tolist() == weights.flatten()[[1, 2, 3, 0]].tolist()


def test_the_first_rows_of_copies() -> None:
    copies, choice = Copies(torch.arange(4), torch.arange(4).view(2, 2)), torch.arange(4)
    assert first_rows(copies, choice, 4) == (copies, choice)
    fewer, choices = first_rows(copies, choice, 3)
    assert fewer.source.tolist() == choices.tolist() == [0, 1, 2] and fewer.places is copies.places
