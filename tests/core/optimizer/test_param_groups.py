"""Settings of parameters, and the ranges of units that share them."""

import itertools

from support.small_models import SmallModel

from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.sharding_strategy import Sharding
from megatron.core.distributed.units import plan_units
from megatron.core.initializers import Constant
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import (
    GroupSettings,
    ParameterRange,
    ParamKey,
    describe_groups,
    parameter_ranges,
    settings_of,
)
from megatron.core.parameters import Box, ParameterInfo

CONFIG = OptimizerConfig(lr=0.1)


def info(name: str, *shape: int, **facts: object) -> ParameterInfo:
    return ParameterInfo(shape, Box.whole(shape), Constant(0.0), name=name, **facts)  # type: ignore[arg-type]


def test_keys_match_names_as_a_shell_does() -> None:
    assert ParamKey("layers.*.weight").matches("layers.3.mlp.weight")
    assert not ParamKey("layers.?.weight").matches("layers.13.weight")
    assert not ParamKey("*.Weight").matches("a.weight")
    assert ParamKey(("a", "layers.[12].*")).matches("layers.2.bias")


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    assert settings_of(info("a.weight", 2, 2), CONFIG) == GroupSettings()
    assert settings_of(info("a.bias", 2, 2), CONFIG) == GroupSettings(wd_mult=0.0)
    assert settings_of(info("a.q_layernorm.weight", 2), CONFIG) == GroupSettings(wd_mult=0.0)
    decaying = OptimizerConfig(lr=0.1, apply_wd_to_qk_layernorm=True)
    for name, decays in (("a.q_layernorm.weight", 1.0), ("a.k_layernorm.bias", 0.0), ("a.layernorm.weight", 0.0)):
        assert settings_of(info(name, 2), decaying).wd_mult == decays
    assert settings_of(info("a.weight", 2, 2, grid="expert"), CONFIG).is_expert_parallel


def test_embedding_and_output_have_their_own_rate_only_if_it_is_given() -> None:
    table = info("embedding", 2, 2, embedding_or_output=True)
    assert settings_of(table, CONFIG) == GroupSettings()
    own = OptimizerConfig(lr=0.1, decoupled_lr=0.4, decoupled_min_lr=0.2)
    assert settings_of(table, own) == GroupSettings(max_lr=0.4, min_lr=0.2, is_decoupled_lr=True)
    assert settings_of(info("a", 2, 2), own) == GroupSettings()


def test_rates_by_width() -> None:
    kinds = {
        "matrix": info("a.weight", 2, 2),
        "bias": info("a.bias", 2),
        "table": info("positions", 2, 2, is_table=True),
        "head": info("head", 2, 2, embedding_or_output=True),
    }
    for rule, expected in (("adam", {"matrix": 0.25}), ("sgd", {"bias": 4.0, "table": 4.0, "head": 4.0})):
        wide = OptimizerConfig(lr=0.1, optimizer=rule, mup_width_mult=4.0)  # type: ignore[arg-type]
        found = {name: settings_of(one, wide).lr_mult for name, one in kinds.items()}
        assert found == dict.fromkeys(kinds, 1.0) | expected


def test_later_overrides_win_field_by_field() -> None:
    overrides = {ParamKey("a.*"): {"max_lr": 1.0, "wd_mult": 3.0}, ParamKey("*.b"): {"max_lr": 2.0}}
    assert settings_of(info("a.b", 2, 2), CONFIG, overrides) == GroupSettings(max_lr=2.0, wd_mult=3.0)
    assert settings_of(info("a.c", 2, 2), CONFIG, overrides) == GroupSettings(max_lr=1.0, wd_mult=3.0)
    assert settings_of(info("c", 2, 2), CONFIG, overrides) == GroupSettings()


def units() -> list[Unit]:
    return [Unit(plan, {"dense": Sharding()}) for plan in plan_units(SmallModel(layers=2))]


def test_neighbours_with_the_same_settings_are_one_range() -> None:
    """A layer is weight [0, 64), norm [64, 128) and bias [128, 192), alignment included."""
    assert parameter_ranges(units(), CONFIG) == {
        GroupSettings(): [ParameterRange(0, 0, 128), ParameterRange(1, 0, 64), ParameterRange(2, 0, 64)],
        GroupSettings(wd_mult=0.0): [ParameterRange(1, 64, 192), ParameterRange(2, 64, 192)],
    }


def test_the_settings_of_each_parameter_by_name() -> None:
    found = describe_groups(units(), CONFIG, {ParamKey("layers.1.norm"): {"max_lr": 0.5}})
    rest = {"is_decoupled_lr": False, "is_expert_parallel": False}
    assert found["layers.0.weight"] == {"wd_mult": 1.0, "lr_mult": 1.0, **rest}
    assert found["layers.1.norm"] == {"wd_mult": 0.0, "lr_mult": 1.0, "max_lr": 0.5, **rest}
    assert len(found) == 7


def test_ranges_cover_every_unit_once_and_decayed_groups_come_first() -> None:
    overrides = {ParamKey("layers.1.norm"): {"lr_mult": 0.5}, ParamKey("embedding.*"): {"wd_mult": 0.0}}
    found = parameter_ranges(held := units(), CONFIG, overrides)
    assert [settings.wd_mult for settings in found] == sorted((s.wd_mult for s in found), reverse=True)
    for number, unit in enumerate(held):
        ranges = sorted((r.start, r.stop) for group in found.values() for r in group if r.unit == number)
        assert ranges[0][0] == 0 and ranges[-1][1] == unit.plan.numel
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert found[GroupSettings(wd_mult=0.0, lr_mult=0.5)] == [ParameterRange(2, 64, 128)]
