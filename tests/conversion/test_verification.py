"""Checks of a conversion: weights are finite, and logits are those of transformers."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conversion.saved_models import LLAMA, save_checkpoint

from megatron.conversion.exporting import export_model
from megatron.conversion.verification import (
    Comparison,
    check_finite,
    compare_logits,
    import_transformers,
    sample_tokens,
)
from megatron.core.dist_checkpointing.checkpoint import open_checkpoint
from megatron.core.exceptions import UserError
from pretrain_gpt import build_model


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_values_that_are_not_finite(bad: float, dtype: torch.dtype) -> None:
    values = torch.ones(5)
    check_finite(values.to(dtype), "file: w", dtype)
    values[3] = bad
    if dtype is not torch.float8_e4m3fn or bad != bad:  # that type has no infinity
        with pytest.raises(UserError, match=r"^file: w has values that are NaN or infinite$"):
            check_finite(values.to(dtype), "file: w", dtype)


def test_a_value_that_a_narrow_type_cannot_hold() -> None:
    with pytest.raises(UserError, match=r"NaN or infinite as float16 \(it is stored as float32\)$"):
        check_finite(torch.tensor([1e6]).half(), "w", torch.float32)


def test_rows_exceed_the_window() -> None:
    assert sample_tokens(9, 4096, None).shape == (2, 64) and sample_tokens(9, 16, None).shape == (2, 16)
    assert sample_tokens(9, 4096, (1023, 0)).shape == (2, 1055)
    assert torch.equal(sample_tokens(9, 64, None), sample_tokens(9, 64, None)) and sample_tokens(9, 64, None).max() == 8


def test_nan_is_a_difference() -> None:
    Comparison(2, 64, 1e-4).check("x")
    for difference in (0.1, float("nan"), float("inf")):
        with pytest.raises(
            UserError, match=r"^x: transformers computes other logits than this model, for 2 rows of 64"
        ):
            Comparison(2, 64, difference).check("x")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    save_checkpoint(f"{LLAMA} --window-size 3,0 --max-position-embeddings 64", folder / "run")
    export_model(folder / "run", folder / "theirs", build_model, log=lambda sentence: None)
    return folder


def test_equal_logits(exported: Path) -> None:
    comparison = compare_logits(open_checkpoint(exported / "run" / "iter_0000001"), exported / "theirs", build_model)
    assert comparison.difference < 1e-5 and (comparison.rows, comparison.length) == (2, 64)


@pytest.mark.parametrize("change", [{"sliding_window": 5}, {"rope_theta": 500.0}, {"rms_norm_eps": 0.1}])
def test_a_wrong_config_json_is_seen(exported: Path, change: dict[str, float]) -> None:
    config = exported / "theirs" / "config.json"
    right = config.read_text()
    config.write_text(json.dumps(json.loads(right) | change))
    checkpoint = open_checkpoint(exported / "run" / "iter_0000001")
    try:
        assert compare_logits(checkpoint, exported / "theirs", build_model).difference > 0.01
    finally:
        config.write_text(right)


def test_a_folder_that_transformers_cannot_read(exported: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(exported / "run" / "iter_0000001")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(UserError, match=f"transformers cannot read {tmp_path}: "):
        compare_logits(checkpoint, tmp_path, build_model)


def test_a_class_that_transformers_lacks(exported: Path, tmp_path: Path) -> None:
    """Its code would be in the folder, and is neither run nor asked about."""
    checkpoint = open_checkpoint(exported / "run" / "iter_0000001")
    own = {
        "architectures": ["BaichuanForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_baichuan.BaichuanConfig"},
    }
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(UserError, match=r"transformers \S+ has no BaichuanForCausalLM: leave --verify out"):
        compare_logits(checkpoint, tmp_path, build_model)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="--verify needs transformers, which cannot be imported"):
        import_transformers()
