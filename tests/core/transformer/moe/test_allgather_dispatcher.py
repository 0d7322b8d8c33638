"""Room for the rows of own tokens; `test_moe_layer_over_ranks` and `test_source_exchange` have the exchanges."""

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.transformer.moe.allgather_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


def test_room_is_made_for_the_rows_of_the_last_micro_batch_and_some_more() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=4)
    at = MoEAllGatherTokenDispatcher(config, ProcessGroupCollection.from_grid(RankGrid(2, expert=2), 0))
    assert at.link is None
    assert at.rows_to_expect(3200) == 1600 + 100  # an even share, and a sixteenth
    at.last_rows = 2000
    assert at.rows_to_expect(3200) == 2000 + 125
    at.last_rows = 3150
    assert at.rows_to_expect(3200) == 3200  # all
