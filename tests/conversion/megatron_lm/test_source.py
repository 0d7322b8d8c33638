"""What checkpoints hold beside tensors of the model."""

import pytest
from conversion.megatron_runs import GOLDEN

from megatron.conversion.megatron_lm.source import DistSource, numbers_called
from megatron.conversion.megatron_lm.torch_dist import DistFolder
from megatron.core.exceptions import UserError

FINAL = {"decoder.final_layernorm.weight": (64,)}


def test_steps_stand_in_several_places() -> None:
    for name, folder, steps in (
        ("gpt2style_optim", "iter_0000001", {1.0}),
        ("llamastyle_distopt_fully_reshardable", "iter_0000001", {1.0}),
        ("moe_dp_reshardable", "iter_0000002", {2.0}),
        ("moe_fully_reshardable", "iter_0000002", {2.0}),
    ):
        source = DistSource(DistFolder(GOLDEN / name / folder))
        assert set(numbers_called(source.common()["optimizer"], ("step", "common_step"))) == steps, name


def test_nested_without_end() -> None:
    value: list[object] = [{"step": 3}]
    for _ in range(100_000):
        value = [value]
    assert list(numbers_called(value, ("step",))) == [] and list(numbers_called([{"step": 3}], ("step",))) == [3]


def test_tensors_that_the_model_lacks_are_listed() -> None:
    source = DistSource(DistFolder(GOLDEN / "llamastyle_distopt_fully_reshardable" / "iter_0000001"))
    with pytest.raises(
        UserError, match=r"the model of these flags has no decoder.layers.mlp.linear_fc1.layer_norm_weight"
    ):
        source.find(FINAL, with_optimizer=True)
    with pytest.raises(UserError, match=r"has no decoder.gone.weight, which the flags of the model need"):
        source.find(FINAL | {"decoder.gone.weight": (1,)}, with_optimizer=False)
