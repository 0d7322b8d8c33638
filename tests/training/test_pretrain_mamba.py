"""pretrain_mamba.py: flags of hybrid models, a run, its checkpoint, and what flags cannot say."""

from typing import Any

import pytest
from support.runs import TINY, train_on_ranks

import pretrain_mamba
from megatron.core.transformer.layer_costs import flops_per_token, layer_cost
from megatron.training.arguments import configure
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.run_description import architecture_differences, describe_run
from megatron.training.providers import Providers

PROVIDERS = Providers(pretrain_mamba.build_model, pretrain_mamba.build_datasets, pretrain_mamba.build_forward_step)
MAMBA = "--mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 4 --mamba-conv-kernel-dim 3 --mock-data"
SIZES = f"{TINY.replace('--num-layers 2 ', '')} --train-iters 4 --position-embedding-type none {MAMBA}"


def configured(flags: str, world_size: int = 1) -> Any:
    environment = LaunchEnvironment(world_size, False)
    return configure(f"{SIZES} {flags}".split(), None, pretrain_mamba.DEFAULTS, launch_environment=environment)


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--num-layers 3", "MMM"),
        ("--hybrid-layer-pattern M*-", "M*-"),
        ("--is-hybrid-model --num-layers 3 --hybrid-override-pattern M*-", "M*-"),
        ("--num-layers 4 --hybrid-attention-ratio 0.25 --hybrid-mlp-ratio 0.5", "M-*-"),
    ],
)
def test_the_ways_to_say_the_layers(flags: str, pattern: str) -> None:
    transformer = configured(flags).transformer
    assert transformer.hybrid_layer_pattern == pattern and transformer.num_layers == len(pattern)


def test_a_model_without_attention_needs_no_heads() -> None:
    """Nor do they matter to its layout, or to whether two models are the same."""
    without = SIZES.replace("--num-attention-heads 2", "")
    assert without != SIZES
    two, one = LaunchEnvironment(2, False), LaunchEnvironment(1, False)

    def config_of(flags: str, launch: LaunchEnvironment = one) -> Any:
        return configure(f"{without} {flags}".split(), None, pretrain_mamba.DEFAULTS, launch_environment=launch)

    for pattern in ("--num-layers 4", "--hybrid-layer-pattern M-M-", "--hybrid-layer-pattern M/M"):
        config = config_of(pattern)
        for heads in ("", "--num-attention-heads 1", "--num-attention-heads 3"):
            other = config_of(f"{pattern} {heads} --tensor-model-parallel-size 2", two)
            assert not architecture_differences(other, describe_run(config))
            assert not architecture_differences(config, describe_run(other))
            recorded = describe_run(other)["architecture"] | {"num_attention_heads": 7}  # as an older version did
            assert not architecture_differences(config, {"architecture": recorded})
    for pattern in ("M*", "MM/*-"):
        with pytest.raises(ConfigurationError, match="--num-attention-heads is missing"):
            config_of(f"--hybrid-layer-pattern {pattern}")


def test_the_bars_of_a_pattern_are_no_other_model() -> None:
    plain = configured("--hybrid-layer-pattern MMM-M*")
    split = configured("--hybrid-layer-pattern MM|M-M* --pipeline-model-parallel-size 2", 2)
    older = describe_run(split)
    older["architecture"]["hybrid_layer_pattern"] = "MM|M-M*"
    for config, described in ((plain, describe_run(split)), (split, describe_run(plain)), (plain, older)):
        assert not architecture_differences(config, described)
    (difference,) = architecture_differences(configured("--hybrid-layer-pattern MMMMM*"), describe_run(split))
    assert "--hybrid-layer-pattern is MMMMM* in this run and MMM-M* in the checkpoint" in difference


def test_a_bar_ends_a_pipeline_stage() -> None:
    transformer = configured("--hybrid-layer-pattern MM*|M- --pipeline-model-parallel-size 2", 2).transformer
    assert transformer.pipeline_model_parallel_layout == "Ettt|ttL"


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--hybrid-layer-pattern M*|M-/*-/*-", "M*|M-/*-/*-"),
        ("--hybrid-layer-pattern M*|M- --mtp-num-layers 2 --mtp-hybrid-override-pattern *-", "M*|M-/*-/*-"),
        ("--hybrid-layer-pattern M*|M-/M --mtp-hybrid-override-pattern *-", "M*|M-/M"),
    ],
)
def test_depths_of_multi_token_prediction(flags: str, pattern: str) -> None:
    transformer = configured(f"{flags} --pipeline-model-parallel-size 2", 2).transformer
    depths = pattern.count("/")
    assert (transformer.hybrid_layer_pattern, transformer.mtp_num_layers) == (pattern, depths)
    assert transformer.num_layers == 4 and transformer.pipeline_model_parallel_layout == f"Ett|tt{'m' * depths}L"


def test_stages_change_nothing_for_a_model_that_predicts_several_tokens() -> None:
    """A Mamba-2 layer and an MLP after the decoder predict one more token, in one process and on two stages."""
    flags = f"{SIZES} --fp64 --num-layers 3 --hybrid-layer-pattern M*-/M- --train-iters 2"
    (alone,) = train_on_ranks(flags, 1)
    *_, last = train_on_ranks(f"{flags} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|ttmL", 2)
    assert last.losses == pytest.approx(alone.losses, rel=1e-11) and len(last.losses) == 2
    (plain,) = train_on_ranks(flags.replace("/M-", ""), 1)
    assert alone.losses[0] == pytest.approx(plain.losses[0], rel=1e-11) and alone.losses[1] != plain.losses[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num-layers 4 --hybrid-layer-pattern M*-", "--hybrid-layer-pattern M*- has 3 layers, --num-layers 4; give"),
        ("--hybrid-layer-pattern MX", "--hybrid-layer-pattern MX: 'X' is no layer; the letters are M (mamba)"),
        ("--num-layers 2 --hybrid-attention-ratio 0.6 --hybrid-mlp-ratio 0.5", "are shares of the layers; together at"),
        ("--num-layers 2 --mamba-num-heads 5", "--mamba-num-groups 2 does not divide the 5 heads of a Mamba-2 layer"),
        ("--num-layers 2 --tensor-model-parallel-size 4", "does not divide --mamba-num-groups 2, the groups of heads"),
    ],
)
def test_impossible_patterns_and_sizes_are_named(flags: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        configured(flags, 4)
    assert said in str(caught.value)


def test_costs_of_each_kind_of_layer() -> None:
    transformer = configured("--hybrid-layer-pattern M*-").transformer
    mamba, attention, mlp = (layer_cost(transformer, number, 16) for number in (1, 2, 3))
    h, channels, states = 32, 64, 2 * 2 * 4
    assert mamba == h * (3 * channels + states + 8) + 3 * (channels + states) + 3.5 * channels * 4
    assert attention == 4 * h * h + 2 * h * 8 and mlp == 8 * h * h
    assert flops_per_token(transformer, 128, 16) == 6 * (mamba + 4 * h * h + 2 * h * 8 + mlp + h * 128)
