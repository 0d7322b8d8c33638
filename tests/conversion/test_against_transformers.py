"""Conversion and whole models compared with transformers, which computes from its own files."""

from pathlib import Path

import pytest
import torch
import transformers
from conversion.oracles import (
    MODELS,
    architecture_of,
    logits_of,
    make_model,
    make_model_of,
    random_settings,
    save_model,
    some_tokens,
)
from safetensors.torch import load_file

from megatron.conversion.exporting import export_model
from megatron.conversion.importing import import_model
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model


def quiet(sentence: str) -> None:
    pass


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.fast(
    "llama 3.2",
    "mistral",
    "qwen 2",
    "mixtral",
    "qwen 3 moe",
    "qwen 3",
    "gpt-oss",
    "deepseek v3",
    "deepseek v3.2",
    "gemma 2",
    "gemma 3",
    "gemma 3 with a cap of scores",
    "gemma 3 without windows",
    "olmo 2",
    "olmo 3",
    "granite",
    "gpt 2",
    "phi 3",
    "phi 4 mini",
    "qwen 3 next",
    "mamba 2",
    "nemotron h",
    "falcon",
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_files(name: str, tmp_path: Path) -> None:
    """An imported model computes what transformers does, in float64 and in float32. Its export holds the same bits, and
    transformers reads it as the same model."""
    oracle = make_model(name)
    theirs = save_model(oracle, tmp_path / "theirs")
    in_float32 = import_model(theirs, tmp_path / "ours", build_model, verify=True, log=quiet).comparison
    kind = MODELS[name][0]
    rounding = 1e-4 if kind in ("Qwen3Next", "Qwen3_5") else 1e-5  # a delta net corrects its state token by token
    assert in_float32 is not None and in_float32.difference < rounding
    tokens = some_tokens()
    expected = logits_of(oracle, tokens)
    assert expected.std() > 0.1
    ours = load_trained_model(build_model, tmp_path / "ours", changes=["--fp64"], log=quiet)
    with torch.no_grad():
        torch.testing.assert_close(ours.model(tokens), expected, atol=1e-10, rtol=1e-10)
    is_like_another = kind in ("Phi3", "GPTBigCode", "Ministral", "Olmo3")  # an earlier family expresses it
    named = architecture_of(kind) if is_like_another else None
    back = tmp_path / "back"
    export_model(tmp_path / "ours", back, build_model, architecture=named, shard_bytes=60_000, log=quiet)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    check_equal(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "theirs"))
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, attn_implementation=oracle.config._attn_implementation
        )
        for folder in ("theirs", "back")
    )
    assert type(after) is type(oracle)
    assert after.dtype == torch.float64
    # transformers keeps ERNIE's routers in float32, where float64 cannot be computed
    logits = [logits_of(model.double(), tokens) for model in (after, before)]
    torch.testing.assert_close(*logits, atol=1e-13, rtol=0)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_random_sizes(seed: int, tmp_path: Path) -> None:
    family, settings = random_settings(seed)
    oracle = make_model_of(family, settings, torch.float64, seed)
    import_model(save_model(oracle, tmp_path / "theirs"), tmp_path / "ours", build_model, log=quiet)
    tokens = some_tokens(settings["vocab_size"])
    ours = load_trained_model(build_model, tmp_path / "ours", changes=["--fp64"], log=quiet)
    with torch.no_grad():
        torch.testing.assert_close(ours.model(tokens), logits_of(oracle, tokens), atol=1e-10, rtol=1e-10)
    export_model(tmp_path / "ours", tmp_path / "back", build_model, architecture=f"{family}ForCausalLM", log=quiet)
    check_equal(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "theirs"))
