"""Flags of a shrunk run that differ from the user's."""

from support.runs import TINY

from megatron.diagnosis.layout_check.shrink_layout import LayoutSizes
from megatron.diagnosis.layout_check.shrink_model import ShrunkFlags, fields_of_groups
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment


def flags_of(flags: str, ranks: int, sizes: LayoutSizes) -> ShrunkFlags:
    words = f"{TINY} --mock-data --train-iters 1 --num-layers 32 --global-batch-size 64 {flags}".split()
    return ShrunkFlags(configure(words, launch_environment=LaunchEnvironment(ranks, False)), sizes, 3, [])


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_sizes_fit_the_layout() -> None:
    words = flags_of("--tensor-model-parallel-size 2", 2, LayoutSizes(tensor=2)).model_words()
    assert (value_of(words, "--num-attention-heads"), value_of(words, "--train-iters")) == ("4", "3")
    assert int(value_of(words, "--seq-length")) % 4 == 0 and "--fp64" in words and "--mock-data" in words


def test_layers_follow_the_stages() -> None:
    assert flags_of("", 2, LayoutSizes(data=2)).num_layers == 2
    assert flags_of("--pipeline-model-parallel-size 2", 2, LayoutSizes(pipeline=2)).num_layers == 4
    chunks = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4"
    shrunk = flags_of(chunks, 2, LayoutSizes(pipeline=2))
    assert shrunk.num_layers == 8 and value_of(shrunk.layout_words(), "--num-virtual-stages-per-pipeline-rank") == "2"


def test_a_flag_of_a_dimension_that_is_gone_is_left_out_and_said() -> None:
    shrunk = flags_of("--tensor-model-parallel-size 2 --sequence-parallel", 2, LayoutSizes(data=2))
    words = shrunk.layout_words()
    assert value_of(words, "--tensor-model-parallel-size") == "1" and "sequence_parallel" in shrunk.left_out
    assert shrunk.notes == ["left out, for it does not fit the smaller layout: --sequence-parallel"]


def test_patterns_over_layers_are_cut() -> None:
    words = flags_of("--no-rope-freq 4 --position-embedding-type rope", 2, LayoutSizes(data=2)).model_words()
    assert value_of(words, "--no-rope-freq") == "[0,1]"


def test_other_token_mixers_are_small_and_fit_the_layout() -> None:
    sizes, flags = LayoutSizes(tensor=2), "--tensor-model-parallel-size 2"
    hybrid = flags_of(f"{flags} --hybrid-layer-pattern {'MM*-' * 8} --mamba-head-dim 4", 2, sizes)
    words = hybrid.model_words()
    assert (hybrid.num_layers, value_of(words, "--hybrid-layer-pattern")) == (3, "M*-")
    assert (value_of(words, "--mamba-num-groups"), value_of(words, "--mamba-num-heads")) == ("2", "4")
    configure([*f"{TINY} --mock-data".split(), *words], launch_environment=LaunchEnvironment(1, False))
    delta = f"--experimental-attention-variant gated_delta_net --linear-attention-freq {[1, 1, 0, 1] * 8}"
    words = flags_of(f"{flags} {delta.replace(', ', ',')}", 2, sizes).model_words()
    assert value_of(words, "--linear-attention-freq") == "[1,1]" and value_of(words, "--linear-num-key-heads") == "4"
    sparse = "--experimental-attention-variant dsa --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128"
    latent = "--multi-latent-attention --dsa-indexer-topk 2048 --q-lora-rank 24"
    words = flags_of(f"{flags} {sparse} {latent}", 2, sizes).model_words()
    assert (value_of(words, "--dsa-indexer-topk"), value_of(words, "--dsa-indexer-head-dim")) == ("4", "6")


def test_fields_of_a_section_of_help() -> None:
    assert "num_moe_experts" in fields_of_groups(["mixture of experts"])
    assert fields_of_groups([]) == []
