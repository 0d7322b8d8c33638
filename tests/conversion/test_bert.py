"""BERT of transformers both ways: the same logits of both heads, and the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conversion.oracles import Widened
from safetensors.torch import load_file, save_file

from megatron.conversion.exporting import export_model
from megatron.conversion.families import family_of
from megatron.conversion.family_choice import choose_family
from megatron.conversion.importing import Imported, import_model
from megatron.core.exceptions import UserError
from megatron.training.trained_model import config_for_one_process, load_trained_model
from tools.entry_scripts import build_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}
MODERN = {"pad_token_id": 0, "attn_implementation": "eager"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {"type_vocab_size": 3})
        for name in (
            "BertForPreTraining",
            "BertForMaskedLM",
            "MegatronBertForPreTraining",
            "MegatronBertForMaskedLM",
        )
    },
    "untied, relu": ("BertForPreTraining", {"tie_word_embeddings": False, "hidden_act": "relu"}),
    "untied, gelu_new": ("MegatronBertForMaskedLM", {"tie_word_embeddings": False, "hidden_act": "gelu_new"}),
    "ModernBERT": ("ModernBertForMaskedLM", MODERN | {"local_attention": 6, "num_hidden_layers": 5}),
    "ModernBERT with every bias": (
        "ModernBertForMaskedLM",
        MODERN
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True, "local_attention": 4}
        | {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False}
        | {"classifier_activation": "relu", "hidden_activation": "gelu_pytorch_tanh", "norm_eps": 1e-3}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        },
    ),
}


def quiet(sentence: str) -> None:
    pass


def save_random(architecture: str, folder: Path, **settings: Any) -> Any:
    """Saves a model of transformers in float64 whose weights, norms and biases too, are random; returns it."""
    config = getattr(transformers, architecture.partition("For")[0] + "Config")(**SIZES | settings)
    model = getattr(transformers, architecture)(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.2
            is_norm = weight.dim() == 1 and name.endswith("weight")
            weight.copy_(drawn + 1 if is_norm else drawn)
    model.save_pretrained(folder)
    return model


def imported(source: Path, root: Path, **options: Any) -> Imported:
    return import_model(source, root, build_model, **{"log": quiet, **options})


@pytest.mark.fast("BertForPreTraining", "MegatronBertForMaskedLM", "untied, relu", "ModernBERT with every bias")
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_files(name: str, tmp_path: Path) -> None:
    """An imported model computes both heads as transformers does, in float64 with padding and in float32. Its export
    holds the same bits."""
    architecture, settings = MODELS[name]
    oracle = save_random(architecture, tmp_path / "theirs", **settings)
    done = imported(tmp_path / "theirs", tmp_path / "ours", verify=True)
    assert done.comparison is not None and done.comparison.difference < 1e-5 and done.model_family == "bert"
    trained = load_trained_model(build_model, tmp_path / "ours", changes=["--fp64"], log=quiet)
    tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(2))
    count, mask = settings.get("type_vocab_size", 0 if name.startswith("Modern") else 2), torch.ones_like(tokens)
    mask[1, 9:] = 0
    types = torch.arange(16).expand(2, -1) * count // 16 if count else None
    with torch.no_grad():
        words, in_order = trained.model(tokens, mask, types)
    with torch.no_grad(), Widened():
        expected = oracle(tokens, attention_mask=mask, **({} if types is None else {"token_type_ids": types}))
    real = mask.bool()
    torch.testing.assert_close(words[real], expected[0][real], atol=1e-11, rtol=0)
    if architecture.endswith("PreTraining"):
        torch.testing.assert_close(in_order, expected[1], atol=1e-11, rtol=0)
    export_model(tmp_path / "ours", tmp_path / "back", build_model, verify=True, log=quiet)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [architecture]
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    if not settings.get("tie_word_embeddings", True):
        before.pop("cls.predictions.bias", None)  # transformers writes it and reads the output layer's own bias
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_files_of_old_releases(tmp_path: Path) -> None:
    """Norms with gamma and beta, position ids, copies of tied weights, and a head that the class does not have."""
    folder = tmp_path / "theirs"
    save_random("BertForPreTraining", folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"position_embedding_type": "absolute"}))
    tensors = load_file(folder / "model.safetensors")
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in tensors.items()
    }
    words = tensors["bert.embeddings.word_embeddings.weight"]
    old |= {"cls.predictions.decoder.weight": words.clone(), "bert.embeddings.position_ids": torch.arange(16)}
    save_file(old, folder / "model.safetensors")
    said: list[str] = []
    imported(folder, tmp_path / "ours", log=said.append)
    assert any("left out 5 tensors that are no weights of BertForMaskedLM: bert.embedd" in line for line in said)
    export_model(tmp_path / "ours", tmp_path / "back", build_model, log=quiet)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == {name for name in tensors if "pooler" not in name and "seq_relationship" not in name}
    assert all(torch.equal(back[name], tensors[name]) for name in back)
    old["cls.predictions.decoder.weight"] += 1
    save_file(old, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"decoder\.weight and .*word_embeddings\.weight differ"):
        imported(folder, tmp_path / "again")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_act", "relu2", "hidden_act is 'relu2'; gelu, gelu_new, gelu_pytorch_tanh, relu are supported"),
        ("position_embedding_type", "relative_key", "position_embedding_type is 'relative_key'"),
        ("is_decoder", True, "is_decoder is True"),
        ("type_vocab_size", 0, "type_vocab_size is 0"),
        ("type_vocab_size", "2", "type_vocab_size is '2', but must be an integer"),
        ("num_key_value_heads", 2, "num_key_value_heads is not known for BertForPreTraining"),
    ],
)
def test_a_config_that_changes_the_function_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        family_of("BertForPreTraining").fields_of(SIZES | {key: value})


EXACT = "--no-bias-gelu-fusion"
MODERN_FLAGS = (
    "--disable-bias-linear --exact-geglu --no-norm-bias --embedding-norm --no-first-input-norm --bert-no-head-bias "
    "--bert-no-binary-head --position-embedding-type rope --window-size 4,4 --window-attn-skip-freq ([0]+[1])"
)
FIRST = f"{EXACT} --norm-placement post_residual --embedding-norm"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (FIRST, "BertForPreTraining"),
        (f"{FIRST} --bert-no-binary-head --bert-num-tokentypes 2", "BertForMaskedLM"),
        (f"{FIRST} --bert-num-tokentypes 4 --hidden-dropout 0.3", "BertForPreTraining"),
        (EXACT, "MegatronBertForPreTraining"),
        (f"{EXACT} --untie-embeddings-and-output-weights", "MegatronBertForPreTraining"),
        ("--bert-head-activation gelu_tanh", "MegatronBertForPreTraining"),
        ("--relu --bert-head-activation relu", "MegatronBertForPreTraining"),
        ("", "MegatronBertForPreTraining is the nearest architecture, but: --bert-head-activation is gelu_tanh for"),
        (MODERN_FLAGS, "ModernBertForMaskedLM"),
        (f"{MODERN_FLAGS} --softmax-scale 0.3", "--softmax-scale"),
        (f"{FIRST} --bert-no-binary-head", "--bert-num-tokentypes"),
        (f"{EXACT} --swiglu", "the activation "),
        (f"{EXACT} --disable-bias-linear", "--disable-bias-linear is False for MegatronBertForPreTraining"),
        (f"{EXACT} --add-qkv-bias --position-embedding-type rope", "--position-embedding-type is learned_absolute for"),
        (f"{EXACT} --normalization RMSNorm", "--normalization is LayerNorm for MegatronBert"),
        (f"{EXACT} --kv-channels 24", "--kv-channels is 16 for"),
        (f"{EXACT} --num-experts 2", "no architecture that can be exported is a BERT with experts"),
        (f"{EXACT} --embedding-norm", "--embedding-norm is not set for MegatronBertForPreTraining"),
        (f"{EXACT} --logit-scale 0.5", "--logit-scale"),
        (f"{EXACT} --window-size 4,4", "--window-size"),
    ],
)
def test_an_export_says_the_model_or_names_the_flag(flags: str, expected: str) -> None:
    base = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
        "--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 39"
    )
    config = config_for_one_process(
        {"command_line": [*base.split(), *flags.split()], "model_family": "bert"}, [], has_cuda=False
    )
    if not expected.isalnum():
        with pytest.raises(UserError, match=expected):
            choose_family(config, None)
        return
    assert choose_family(config, None).architecture == expected
    with pytest.raises(
        UserError, match="LlamaForCausalLM was asked for, which is a GPT, but the checkpoint has a BERT"
    ):
        choose_family(config, "LlamaForCausalLM")
