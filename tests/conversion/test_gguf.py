"""GGUF files: read back by the gguf package, and loaded by transformers, which computes the same logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conversion.oracles import logits_of, make_model, save_model, some_tokens
from conversion.test_against_transformers import quiet, tensors_of

from megatron.conversion.gguf import GgufType, write_gguf
from megatron.core.exceptions import UserError

gguf = pytest.importorskip("gguf")


def written(name: str, folder: Path, kind: GgufType = "f32", **changes: Any) -> tuple[Any, Path]:
    """A model of transformers, and its GGUF file."""
    model = make_model(name, torch.float32, **changes)
    write_gguf(save_model(model, folder / "hub"), folder / "m.gguf", kind, quiet, name="m")
    return model, folder / "m.gguf"


def values_of(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a file in float32, by name, as the gguf package reads them."""
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in gguf.GGUFReader(file).tensors
    }


def setting(file: Path, key: str) -> Any:
    field = gguf.GGUFReader(file).get_field(key)
    return None if field is None else field.contents()


MODELS = ("llama 2", "llama 3.1", "llama with all biases", "qwen 2", "qwen 3", "qwen 3 moe", "gpt 2")


@pytest.mark.fast("llama 3.1", "qwen 3 moe", "gpt 2")
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    """The sizes are given to transformers, which takes some of them from no GGUF file."""
    model, file = written(name, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=model.config, dtype=torch.float32
    )
    tokens = some_tokens()
    torch.testing.assert_close(logits_of(loaded.eval(), tokens), logits_of(model, tokens), rtol=1e-5, atol=1e-4)


def test_experts_of_a_layer_are_one_tensor(tmp_path: Path) -> None:
    """transformers reads no Mixtral from GGUF, so that its tensors are compared here."""
    _, file = written("mixtral", tmp_path)
    hub, found = tensors_of(file.parent / "hub"), values_of(file)
    for theirs, ours in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        experts = [hub[f"model.layers.2.block_sparse_moe.experts.{number}.{theirs}.weight"] for number in range(4)]
        assert np.array_equal(found[f"blk.2.ffn_{ours}_exps.weight"], torch.stack(experts).numpy())
    assert np.array_equal(found["blk.1.ffn_gate_inp.weight"], hub["model.layers.1.block_sparse_moe.gate.weight"])
    assert (setting(file, "llama.expert_count"), setting(file, "llama.expert_used_count")) == (4, 2)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_every_tensor_has_its_type_and_is_rounded_once(kind: GgufType, tmp_path: Path) -> None:
    _, file = written("llama 2", tmp_path, "f32")
    exact = values_of(file)
    write_gguf(tmp_path / "hub", tmp_path / "rounded.gguf", kind, quiet)
    rounded = values_of(tmp_path / "rounded.gguf")
    types = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "rounded.gguf").tensors}
    assert exact.keys() == rounded.keys() and len(exact) == 3 + 9 * 3
    for name, values in exact.items():
        if values.ndim == 1:
            assert types[name] == gguf.GGMLQuantizationType.F32 and np.array_equal(rounded[name], values), name
            continue
        assert types[name] == gguf.GGMLQuantizationType[kind.upper()], name
        if kind == "q8_0":
            again = gguf.dequantize(gguf.quantize(values, types[name]), types[name])
            assert np.array_equal(rounded[name], again), name
            blocks = values.reshape(-1, 32)
            step = np.abs(blocks).max(1, keepdims=True) / 127  # its scale is stored in float16
            assert (np.abs(rounded[name].reshape(-1, 32) - blocks) <= step * (0.5 + 127 * 2**-11) + 1e-7).all(), name
        else:
            dtype = torch.float16 if kind == "f16" else torch.bfloat16
            assert np.array_equal(rounded[name], torch.from_numpy(values.copy()).to(dtype).float().numpy()), name
    expected = {"f16": 1, "bf16": 32, "q8_0": 7}[kind]
    assert setting(tmp_path / "rounded.gguf", "general.file_type") == expected


def test_rows_of_other_lengths_stay_f16(tmp_path: Path) -> None:
    said: list[str] = []
    save_model(make_model("llama 2", torch.float32, intermediate_size=40), tmp_path / "hub")
    write_gguf(tmp_path / "hub", tmp_path / "m.gguf", "q8_0", said.append)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "F16" and types["blk.0.ffn_up.weight"] == "Q8_0"
    assert any(line.startswith("3 matrices stay f16, since their rows are no multiple of 32") for line in said)


def test_settings(tmp_path: Path) -> None:
    _, file = written("qwen 2.5 in yarn", tmp_path)
    expected = {
        "general.architecture": "qwen2",
        "general.name": "m",
        "qwen2.context_length": 64,
        "qwen2.embedding_length": 64,
        "qwen2.block_count": 3,
        "qwen2.attention.head_count": 4,
        "qwen2.attention.head_count_kv": 2,
        "qwen2.attention.key_length": 16,
        "qwen2.vocab_size": 99,
        "qwen2.rope.freq_base": 1e6,
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 16,
    }
    assert {key: setting(file, key) for key in expected} == expected


def test_a_window_limits_the_length(tmp_path: Path) -> None:
    said: list[str] = []
    save_model(make_model("mistral", torch.float32), tmp_path / "hub")
    write_gguf(tmp_path / "hub", tmp_path / "m.gguf", "f32", said.append)
    assert setting(tmp_path / "m.gguf", "llama.context_length") == 7
    assert any("the context length is 7, the width of the model's window" in line for line in said)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma 2", {}, "Gemma2ForCausalLM cannot be written as GGUF; these can: LlamaForCausalLM, Mistral.*GPT2LM"),
        ("llama with exact gelu", {}, "hidden_act is 'gelu'; llama.cpp's llama has 'silu' or 'swish'"),
        ("qwen 3 moe, mixed layers", {}, "norm_topk_prob is False; .*\n.*mlp_only_layers is .1.; llama.cpp's qwen3moe"),
        (
            "llama, positions that grow with the row",
            {},
            "rope_type is 'dynamic'; llama.cpp's llama has default, linear",
        ),
    ],
)
def test_what_cannot_be_written(name: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"(?s){said}"):
        written(name, tmp_path, **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


def test_a_weight_beyond_the_type_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    model = make_model("llama 2", torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = 7e4
    save_model(model, tmp_path / "hub")
    with pytest.raises(UserError, match=r"--to-gguf: blk\.1\.ffn_up\.weight has values that are .* as float16"):
        write_gguf(tmp_path / "hub", tmp_path / "m.gguf", "f16", quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]
    with pytest.raises(UserError, match="hub exists; name a file that does not exist"):
        write_gguf(tmp_path / "hub", tmp_path / "hub", "f16", quiet)
