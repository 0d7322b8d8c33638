"""Multimodal folders of transformers: the text part is imported and computes the same; its export is a text model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conversion.oracles import SIZES, logits_of, randomise, save_model, some_tokens
from safetensors.torch import load_file
from support.runs import differences, train

from megatron.conversion.exporting import export_model
from megatron.conversion.families import FAMILIES
from megatron.conversion.importing import import_model, open_hub_model
from megatron.core.exceptions import UserError
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model

BASE = (
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --num-workers 0 --log-interval 100 --seq-length 16 "
    "--eval-iters 0 --mock-data --train-iters 2 --tokenizer-type NullTokenizer --vocab-size 98"
)
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "image_size": 28,
    "patch_size": 14,
}
_TEXT = {key: value for key, value in SIZES.items() if key != "attn_implementation"}
_GEMMA = {
    "head_dim": 12,
    "sliding_window": 6,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_LLAMA = {"head_dim": 16, "intermediate_size_mlp": 40, "num_local_experts": 4, "attention_chunk_size": 6}
_QWEN = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
}
_PIXTRAL = VISION | {"model_type": "pixtral"}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma 3": ("Gemma3", _GEMMA, VISION, {"mm_tokens_per_image": 4}),
    "llama 4": ("Llama4", _LLAMA, VISION | {"vision_output_dim": 16, "projector_input_dim": 16}, {}),
    "mistral 3": ("Mistral3", {"model_type": "mistral", "sliding_window": 7, "head_dim": 12}, _PIXTRAL, {}),
    "mistral 3 untied": ("Mistral3", {"model_type": "mistral"}, _PIXTRAL, {"tie_word_embeddings": False}),
    "qwen 3.5": ("Qwen3_5", _QWEN, {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24}, {}),
}
TEXT_CLASSES = {
    "Gemma3": "Gemma3ForCausalLM",
    "Llama4": "Llama4ForCausalLM",
    "Mistral3": "MistralForCausalLM",
    "Qwen3_5": "Qwen3_5ForCausalLM",
}


def quiet(sentence: str) -> None:
    pass


def make(name: str) -> Any:
    kind, text, vision, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        text_config=_TEXT | text, vision_config=vision, attn_implementation="eager", **more
    )
    return randomise(getattr(transformers, f"{kind}ForConditionalGeneration")(config), torch.float64, seed=1)


@pytest.mark.parametrize("name", MODELS)
def test_the_text_part(name: str, tmp_path: Path) -> None:
    oracle, tokens, said = make(name), some_tokens(), []
    theirs = save_model(oracle, tmp_path / "theirs")
    result = import_model(theirs, tmp_path / "ours", build_model, verify=True, log=said.append)
    assert result.comparison is not None and result.comparison.difference < 1e-4
    text_class = TEXT_CLASSES[MODELS[name][0]]
    assert f"imported the text part of {type(oracle).__name__} as {text_class}, without " in "".join(said)
    ours = load_trained_model(build_model, tmp_path / "ours", changes=["--fp64"], log=quiet)
    # Llama4ForConditionalGeneration of transformers 5.24 fails without images.
    expected = logits_of(oracle.language_model if name == "llama 4" else oracle, tokens)
    assert expected.std() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(ours.model(tokens), expected, atol=1e-10, rtol=1e-10)
    export_model(tmp_path / "ours", tmp_path / "back", build_model, log=quiet)
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert type(after).__name__ == text_class
    torch.testing.assert_close(logits_of(after, tokens), expected, atol=1e-10, rtol=1e-10)
    stored = load_file(theirs / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    values = {name.replace("language_model.", "", 1).removeprefix("model."): value for name, value in stored.items()}
    assert all(torch.equal(values[name.removeprefix("model.")], value) for name, value in back.items())


@pytest.mark.fast("gemma 3")
@pytest.mark.parametrize("name", MODELS)
def test_a_run_begins_with_the_text_part(name: str, tmp_path: Path) -> None:
    theirs = save_model(make(name).float(), tmp_path / "theirs")
    flags = open_hub_model(theirs, theirs, (), FAMILIES, quiet).flags
    base = f"{BASE} {' '.join(flags[: flags.index('--tokenizer-type')])}"
    import_model(theirs, tmp_path / "ours", build_model, log=quiet)
    expected = train(f"--pretrained-checkpoint {tmp_path / 'ours'}", base=base)
    run = train(f"--load-hf {theirs}", base=base)
    assert run.losses == expected.losses and len(run.losses) == 2
    assert differences(run.at_start, run.at_end)


def test_a_text_part_that_is_not_supported(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    keys = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    for text, said in (
        (None, "text_config is None; Mistral3ForConditionalGeneration needs an object of its text model"),
        ({"model_type": "ministral3"}, "model_type is 'mistral3', with 'ministral3' in text_config; of Mistral3For"),
    ):
        file.write_text(json.dumps(keys | {"text_config": text}))
        with pytest.raises(UserError) as refusal:
            import_model(tmp_path, tmp_path / "ours", build_model, log=quiet)
        assert str(refusal.value).startswith(f"{file}: {said}")
