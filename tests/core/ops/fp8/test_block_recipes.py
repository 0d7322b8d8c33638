"""The scalings of recipes with blocks, and the GPUs that they need."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.ops.fp8 import block_recipes
from megatron.core.ops.fp8.block_recipes import MxScaling, Nvfp4Scaling, build_scaling, is_emulated
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit, Role


def test_shapes_of_scales() -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    shapes = {"blockwise": ((256, 1), (2, 1)), "mxfp8": ((256, 2), (256, 2)), "nvfp4": ((256, 4), (256, 4))}
    for recipe, expected in shapes.items():
        scaling = build_scaling(Fp8Settings(recipe, FORMATS["hybrid"]), LinearSplit(), torch.device("cpu"))
        pairs = [scaling.quantize(x, role, rows=True, columns=False, records=True) for role in Role]
        assert [pair.rows.factors.shape for pair in pairs] == [*expected, expected[0]], recipe
        assert all(pair.columns is None for pair in pairs) and is_emulated(recipe) == (recipe != "blockwise")


def test_older_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    settings = Fp8Settings("mxfp8", FORMATS["e4m3"])
    with pytest.raises(UserError, match=r"needs a Blackwell GPU, and this one has .* 9\.0: --fp8-format e4m3 with"):
        build_scaling(settings, LinearSplit(), torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    said: list[str] = []
    monkeypatch.setattr(block_recipes, "warn_on_first_rank", said.append)
    assert isinstance(build_scaling(settings, LinearSplit(), torch.device("cuda", 0)), MxScaling)
    assert "emulated" in said[0]
    with pytest.raises(UserError, match="--fp4-format e2m1 needs a Blackwell GPU"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        build_scaling(Fp8Settings("nvfp4", FORMATS["e4m3"]), LinearSplit(), torch.device("cuda", 0))
    assert isinstance(
        build_scaling(Fp8Settings("nvfp4", FORMATS["e4m3"]), LinearSplit(), torch.device("cpu")), Nvfp4Scaling
    )
