"""Folders with fp8 weights: the cast and its bound, the programs that read them, and the way back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conversion.oracles import make_model, save_model
from conversion.saved_models import LLAMA, save_checkpoint
from conversion.test_against_transformers import quiet, tensors_of
from conversion.test_importing import change_config, change_tensors
from torch import Tensor

from megatron.conversion.exporting import export_model
from megatron.conversion.fp8_folder import Granularity, dequantize, quantize, write_fp8
from megatron.conversion.importing import import_model
from megatron.core.exceptions import UserError
from pretrain_gpt import build_model
from tools.checkpoint.convert import main

GRANULARITIES: tuple[Granularity, ...] = ("tensor", "channel", "block")


def exported(folder: Path, granularity: Granularity, name: str = "llama 2", **changes: Any) -> tuple[Any, Path]:
    """A model of transformers, and the folder with its weights in fp8."""
    model = make_model(name, torch.float32, **changes)
    write_fp8(save_model(model, folder / "hub"), folder / "fp8", granularity)
    return model, folder / "fp8"


def part_of(row: int, column: int, granularity: Granularity) -> tuple[slice, slice]:
    """The elements that have the scale of this one."""
    if granularity == "tensor":
        return slice(None), slice(None)
    if granularity == "channel":
        return slice(row, row + 1), slice(None)
    return tuple(slice(index // 128 * 128, index // 128 * 128 + 128) for index in (row, column))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_each_element_is_rounded_once_with_the_scale_of_its_part(granularity: Granularity) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 200)[:, None]
    weight[7] = 0.0
    found, scale = quantize(weight, granularity)
    assert scale.shape == {"tensor": (1,), "channel": (200, 1), "block": (2, 3)}[granularity]
    back = dequantize(found, scale)
    for row, column in ((0, 0), (7, 3), (127, 127), (128, 128), (199, 299), (30, 256)):
        part = weight[part_of(row, column, granularity)].abs().max()
        one = float(part) / 448 if part > 0 else 1.0
        rounded = (weight[row, column] / one).to(torch.float8_e4m3fn).float() * one
        assert float(back[row, column]) == pytest.approx(float(rounded), rel=1e-6)
        # Three bits of mantissa; below 2^-6 steps of 2^-9.
        assert (
            abs(back[row, column] - weight[row, column]) <= max(abs(weight[row, column]) * 2**-4, one * 2**-10) * 1.01
        )


def rounded_model(model: Any, granularity: Granularity) -> Any:
    """The model with the weights of its linear layers rounded to fp8 and back."""
    for key, weight in model.named_parameters():
        if key.endswith("_proj.weight"):
            weight.data.copy_(dequantize(*quantize(weight.data, granularity)))
    return model


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_transformers_reads_the_folder(granularity: Granularity, tmp_path: Path) -> None:
    """transformers multiplies weights and scales, with the package compressed-tensors for two of the forms."""
    if granularity != "block":
        pytest.importorskip("compressed_tensors")
    model, folder = exported(tmp_path, granularity, hidden_size=256, intermediate_size=384, head_dim=64)
    if granularity == "block":
        as_stored: Any = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        as_stored = transformers.utils.quantization_config.CompressedTensorsConfig(run_compressed=False)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=as_stored, dtype=torch.float32, attn_implementation="eager"
    )
    expected = dict(rounded_model(model, granularity).named_parameters())
    for name, weight in loaded.named_parameters():
        if name in expected:
            torch.testing.assert_close(weight.float(), expected[name], rtol=1e-6, atol=0, msg=name)
    assert "model.layers.1.mlp.up_proj.weight" in dict(loaded.named_parameters())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_import_multiplies_weights_and_scales(granularity: Granularity, tmp_path: Path) -> None:
    _, folder = exported(tmp_path, granularity, "qwen 3 moe")
    import_model(folder, tmp_path / "ours", build_model, log=quiet)
    export_model(tmp_path / "ours", tmp_path / "back", build_model, log=quiet)
    before, stored, back = (tensors_of(tmp_path / name) for name in ("hub", "fp8", "back"))
    assert before.keys() == back.keys()
    in_fp8 = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(in_fp8) == 3 * (4 + 3 * 6), "attention and experts of three layers"
    for name, tensor in back.items():
        expected = dequantize(*quantize(before[name], granularity)) if name in in_fp8 else before[name]
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected), name


def test_the_description_is_that_of_vllm(tmp_path: Path) -> None:
    described = {}
    for granularity in GRANULARITIES:
        _, folder = exported(tmp_path / granularity, granularity, "qwen 3 moe")
        described[granularity] = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert described["block"].items() >= {"quant_method": "fp8", "weight_block_size": [128, 128]}.items()
    for granularity in ("tensor", "channel"):
        found = described[granularity]
        assert (found["quant_method"], found["format"]) == ("compressed-tensors", "float-quantized")
        assert found["config_groups"]["group_0"]["weights"]["strategy"] == granularity
        assert found["ignore"] == ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(3))]


def test_one_command_exports_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = save_checkpoint(f"{LLAMA} --untie-embeddings-and-output-weights", tmp_path / "run")
    words = ["export", "--load", str(root), "--hf-dir", str(tmp_path / "fp8"), "--fp8", "channel", "--no-verify"]
    assert main([*words, "--max-shard-size", "30KB"]) == 0
    assert "14 matrices in fp8" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "run"]
    import_model(tmp_path / "fp8", tmp_path / "back", build_model, log=quiet)
    assert main(["export", "--load", str(root), "--to-gguf", str(tmp_path / "x.gguf"), "--fp8", "block"]) == 2
    assert "--fp8 is for --hf-dir without --to-gguf" in capsys.readouterr().err


def without_scale(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]


def with_another_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight_scale"] = torch.ones(5, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_scale, "model.layers.1.mlp.up_proj.weight is fp8, but has no .*up_proj.weight_scale"),
        (
            with_another_scale,
            r"weight_scale has shape \[5, 1\]; scales of a weight \[96, 64\] have shape \[1\], \[96, 1",
        ),
    ],
)
def test_scales_that_do_not_fit(change: Any, said: str, tmp_path: Path) -> None:
    _, folder = exported(tmp_path, "channel")
    change_tensors(folder, change)
    with pytest.raises(UserError, match=said):
        import_model(folder, tmp_path / "ours", build_model, log=quiet)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--fp8: GPT2LMHeadModel cannot be written in fp8; these can: LlamaFor"):
        exported(tmp_path / "gpt2", "tensor", "gpt 2")
    _, folder = exported(tmp_path, "tensor")
    with pytest.raises(UserError, match="the model is quantized already"):
        write_fp8(folder, tmp_path / "again", "tensor")
    with pytest.raises(UserError, match="fp8 is not empty"):
        write_fp8(tmp_path / "hub", folder, "tensor")
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match="quantization_config is not known for LlamaForCausalLM"):
        import_model(folder, tmp_path / "ours", build_model, log=quiet)
