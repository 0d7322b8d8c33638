"""The default groups: the library never needs them, because it passes groups to everything that it builds."""

from unittest import mock

from support.processes import run_on_ranks
from support.runs import TINY, train

from megatron.core.groups import defaults
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid

RUN = "--mock-data --eval-iters 0 --train-iters 1"
LAYOUTS = (
    "--multi-latent-attention --qk-layernorm --position-embedding-type rope --tensor-model-parallel-size 2 "
    "--sequence-parallel --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "--context-parallel-size 2 --attention-dropout 0 --use-megatron-fsdp",
    "--num-experts 4 --expert-model-parallel-size 2 --mtp-num-layers 1 --moe-shared-expert-intermediate-size 16",
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --tensor-model-parallel-size 2",
)


def ask_for_defaults() -> list[str]:
    """Trains under each layout; returns those in which anything asks for the default groups."""
    asked = []
    for layout in LAYOUTS:
        with mock.patch.object(defaults, "default_collection", side_effect=AssertionError("asked")) as function:
            train(f"{RUN} {layout}", base=TINY)
        asked += [layout] * function.called
    return asked


def test_no_part_of_a_run_asks_for_the_default_groups() -> None:
    assert run_on_ranks(ask_for_defaults, 2) == [[], []]


def test_what_is_passed_comes_before_the_default() -> None:
    mine = ProcessGroupCollection.from_grid(RankGrid(1), rank=0)
    with defaults.default_for_now(ProcessGroupCollection.from_grid(RankGrid(1), rank=0)):
        assert defaults.groups_or_default(mine) is mine
        assert defaults.groups_or_default(None) is defaults.default_collection()
        assert defaults.pp_rank_or_default(3) == 3 and defaults.pp_rank_or_default(None) == 0
    assert not defaults.has_default_collection()
