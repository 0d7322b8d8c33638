"""Layouts: which ones the rules allow, what contradicts them, and how they are ranked."""

import pytest

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.layouts import Layout, Space, contradictions, possible_layouts
from megatron.diagnosis.planning.model_shape import shape_of
from megatron.diagnosis.planning.quantities import quantity
from megatron.diagnosis.planning.ranking import ExactTime, rank_layouts
from megatron.diagnosis.planning.rough_cost import Rates, RoughCost
from megatron.diagnosis.planning.specification import Specification, read_specification
from megatron.diagnosis.planning.specification_text import Answer, Answers

H100 = Rates(6e14, 2.3e11, 5e10)


def space(architecture="Llama 3", params="8B", *, gpus=64, domain=8, batch=512, length=8192, **given: str) -> Space:
    flags = shape_of(architecture, quantity(params), None, length).flags
    answers = Answers({field: Answer(text, f"--{field.replace('_', '-')}") for field, text in given.items()})
    return Space(flags, length, batch, gpus, domain, read_specification(answers) if given else Specification())


@pytest.mark.parametrize(
    "found", [space(), space(gpus=48, batch=480), space("Mixtral", "8x7B"), space("Mamba-2", "2.7B", gpus=16)]
)
def test_layouts_obey_the_rules(found: Space) -> None:
    layouts = list(possible_layouts(found, (1,)))
    assert len(layouts) == len(set(layouts)) > 20
    for layout in layouts:
        assert layout.tensor * layout.pipeline * layout.context * layout.data == found.gpus
        assert layout.tensor <= found.domain and found.heads % layout.tensor == 0
        assert found.global_batch_size % (layout.data * layout.micro_batch) == 0
        assert layout.pipeline * layout.virtual <= found.flags["num_layers"]
        assert (layout.tensor * layout.context * layout.data) % layout.expert == 0
        assert layout.virtual == 1 or layout.num_microbatches(found.global_batch_size) % layout.pipeline == 0
    assert any(layout.expert > 1 for layout in layouts) is bool(found.experts)


def test_given_sizes_are_kept() -> None:
    found = list(possible_layouts(space(tensor_parallel="4", pipeline_parallel="2", data_parallel="remaining"), (1,)))
    assert found and {(layout.tensor, layout.pipeline) for layout in found} == {(4, 2)}
    assert {layout.data for layout in possible_layouts(space(data_parallel="16"), (1,))} == {16}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel": "16"}, "tensor parallelism 16 (--tensor-parallel) is beyond the 8 GPUs that NVLink joins, "
         "and each layer would wait for the network; use 8"),
        ({"tensor_parallel": "3"}, "tensor parallelism 3 (--tensor-parallel) does not divide the 32 heads; use 2 or 4"),
        ({"pipeline_parallel": "64"}, "pipeline parallelism 64 (--pipeline-parallel) is more than the 32 layers; "
         "use at most 32"),
        ({"expert_parallel": "4"}, "expert parallelism 4 (--expert-parallel): the model has no experts; use 1"),
        ({"data_parallel": "24"}, "DP 24 (--data-parallel) is 24, which does not divide 64 GPUs; use sizes whose "
         "product is 16 or 32"),
        ({"tensor_parallel": "4", "pipeline_parallel": "4", "context_parallel": "1", "data_parallel": "2"},
         "TP 4 (--tensor-parallel) x PP 4 (--pipeline-parallel) x CP 1 (--context-parallel) x DP 2 (--data-parallel) "
         "is 32, and there are 64 GPUs; use DP 4 or 32 GPUs"),
    ],
)  # fmt: skip
def test_contradictions_name_the_nearest_values(given: dict[str, str], message: str) -> None:
    assert message in list(contradictions(space(**given)))


DYNAMIC = "yes, dynamic context parallelism"


def test_layouts_of_dynamic_context_parallelism() -> None:
    layouts = list(possible_layouts(space(packing=DYNAMIC), (1, 2, 3)))
    assert len(layouts) > 20
    for layout in layouts:
        assert (layout.pipeline, layout.zero) == (1, 1)
        assert (layout.data * layout.context).bit_count() == 1


@pytest.mark.parametrize(
    ("architecture", "given", "message"),
    [
        ("Llama 3", {"zero_stage": "3"}, "needs ZeRO stage 1, not 3 (--zero-stage); use 1"),
        ("Llama 3", {"pipeline_parallel": "2"}, "needs one stage, not 2 (--pipeline-parallel); use 1"),
        ("Mixtral", {}, "is for dense decoder-only models; write yes, without dynamic context parallelism"),
        ("GPT-3", {}, "does not go with dropout, which this architecture has; use one like Llama"),
    ],
)
def test_what_dynamic_context_parallelism_does_not_go_with(
    architecture: str, given: dict[str, str], message: str
) -> None:
    params = "8x7B" if architecture == "Mixtral" else "8B"
    (sentence,) = contradictions(space(architecture, params, packing=DYNAMIC, **given))
    assert sentence == f"dynamic context parallelism (--packing) {message}"


def test_tensor_parallelism_stays_within_nodes_of_four() -> None:
    (sentence,) = contradictions(space(domain=4, tensor_parallel="8"))
    assert "beyond the 4 GPUs" in sentence and sentence.endswith("use 4")
    assert max(layout.tensor for layout in possible_layouts(space(domain=4), (1,))) == 4


def test_bubble_and_flags_of_a_layout() -> None:
    layout = Layout(4, 2, 8, 2, 1, 1, 1, "full", 1)
    assert layout.num_microbatches(64) == 64
    assert layout.bubble(64) == pytest.approx(7 / (2 * 64 + 7))
    flags = layout.flags()
    assert flags["sequence_parallel"] and flags["num_virtual_stages_per_pipeline_rank"] == 2
    assert flags["recompute_granularity"] == "full" and flags["use_distributed_optimizer"]
    assert layout.name == "TP 4, CP 2, PP 8 x 2 chunks, DP 1, micro-batch 1, recompute full, ZeRO-1"
    assert Layout(1, 1, 1, 1, 1, 8, 1, "none", 3).flags()["data_parallel_sharding_strategy"] == "optim_grads_params"


class AsRough:
    """Exact costs that are the rough ones; layouts of `refused` pipelines are refused."""

    def __init__(self, found: Space, refused: int = 0) -> None:
        self.rough, self.refused = RoughCost(found, 128256, H100), refused

    def time(self, layout: Layout) -> ExactTime:
        if 1 < layout.pipeline <= self.refused:
            raise UserError("--pipeline-model-parallel-size: not today\nmore")
        return ExactTime(self.rough.seconds(layout), 0.5)

    def memory(self, layout: Layout) -> int:
        return int(self.rough.memory(layout))


def ranked(found: Space, limit: float, refused: int = 0):
    exact = AsRough(found, refused)
    return rank_layouts(found, exact.rough, exact, limit)


def test_the_fastest_that_fits_wins_and_others_have_reasons() -> None:
    ranking = ranked(space(), 70e9)
    assert len(ranking.best) == 3 and ranking.considered > 100
    first = ranking.best[0].seconds
    assert all(found.seconds >= first / 1.02 and found.memory <= 70e9 for found in ranking.best)
    assert {found.layout.zero for found in ranking.best} == {1}
    reasons = {loser.reason for loser in ranking.losers}
    assert any("slower" in reason for reason in reasons) and any("needs" in reason for reason in reasons)
    assert not {loser.layout for loser in ranking.losers} & {found.layout for found in ranking.best}


def test_less_memory_takes_more_splitting_or_recompute() -> None:
    roomy, tight = ranked(space(), 180e9).best[0].layout, ranked(space(), 24e9).best[0].layout
    splits = [each.tensor * each.pipeline * each.context for each in (roomy, tight)]
    assert splits[0] < splits[1] or tight.recompute != "none"
    assert roomy.recompute == "none"


def test_higher_stages_of_zero_only_when_nothing_else_fits() -> None:
    found = space(gpus=8, batch=64, tensor_parallel="1", pipeline_parallel="1", context_parallel="1")
    assert ranked(found, 120e9).best[0].layout.zero == 1
    assert ranked(found, 40e9).best[0].layout.zero > 1
    assert ranked(space(gpus=8, batch=64, zero_stage="3"), 120e9).best[0].layout.zero == 3


def test_layouts_that_the_run_refuses_lose_with_its_reason() -> None:
    ranking = ranked(space(), 70e9, refused=64)
    assert all(best.layout.pipeline == 1 for best in ranking.best)
    assert "refused: --pipeline-model-parallel-size: not today" in {loser.reason for loser in ranking.losers}


def test_of_equally_fast_layouts_the_simplest_wins() -> None:
    found = space()
    exact = AsRough(found)
    exact.time = lambda layout: ExactTime(1.0 if layout.tensor < 8 else 0.5, 0.5)
    exact.memory = lambda layout: 1
    first = rank_layouts(found, exact.rough, exact, 70e9).best[0].layout
    assert (first.tensor, first.pipeline, first.recompute) == (8, 1, "none") or first.tensor < 8
    assert first.virtual == 1 and first.context == 1 and first.recompute == "none"
