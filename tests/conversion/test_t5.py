"""T5, T5 1.1 and mT5 of transformers both ways: the same logits, and the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conversion.oracles import Widened
from safetensors.torch import load_file
from torch import nn

from megatron.conversion.exporting import export_model
from megatron.conversion.families import family_of
from megatron.conversion.family_choice import choose_family
from megatron.conversion.importing import import_model
from megatron.core.exceptions import UserError
from megatron.training.trained_model import config_for_one_process, load_trained_model
from tools.entry_scripts import build_model

SIZES = {
    "vocab_size": 61,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
}
BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}


def quiet(sentence: str) -> None:
    pass


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("T5", {}),
    "T5 1.1": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "T5 with SiLU": ("T5", {"feed_forward_proj": "gated-silu"}),
    "mT5": ("MT5", {}),
    "mT5, ReLU": ("MT5", {"feed_forward_proj": "relu"}),
}


def save_random(folder: Path, kind: str, settings: dict[str, Any]) -> Any:
    """Saves a T5, a T5 1.1 or an mT5 in float64 with random weights; returns it."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | BUCKETS | settings)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).double().eval()
    if not settings.get("tie_word_embeddings", True):  # transformers 5 ties them in spite of the config
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3
            weight.copy_(drawn + 1 if "norm" in name else drawn)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_files(name: str, tmp_path: Path) -> None:
    """An imported model computes what transformers does, in float64 and in float32. Its export holds the same bits."""
    untied = name == "T5 1.1"
    oracle = save_random(tmp_path / "theirs", *MODELS[name])
    done = import_model(tmp_path / "theirs", tmp_path / "ours", build_model, verify=True, log=quiet)
    assert done.comparison is not None and done.comparison.difference < 1e-4 and done.model_family == "t5"
    trained = load_trained_model(build_model, tmp_path / "ours", changes=["--fp64"], log=quiet)
    read, written = (torch.randint(61, (2, n), generator=torch.Generator().manual_seed(n)) for n in (15, 9))
    with torch.no_grad(), Widened():
        expected = oracle(read, decoder_input_ids=written, use_cache=False).logits
        torch.testing.assert_close(trained.model(read, written), expected, atol=1e-10, rtol=0)
    export_model(tmp_path / "ours", tmp_path / "back", build_model, verify=True, log=quiet)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    assert before.keys() == after.keys() and ("lm_head.weight" in after) == untied
    assert all(torch.equal(before[name], after[name]) for name in before)
    keys = json.loads((tmp_path / "back" / "config.json").read_text())
    assert keys["architectures"] == [type(oracle).__name__]
    assert keys["tie_word_embeddings"] == (not untied) and keys["num_decoder_layers"] == 3


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("feed_forward_proj", "silu", "feed_forward_proj is 'silu'; relu, gated-gelu, gated-silu are supported"),
        ("dense_act_fn", "gelu", "dense_act_fn is 'gelu'; with feed_forward_proj relu only 'relu' is supported"),
        ("is_decoder", True, "is_decoder is True"),
        ("num_decoder_layers", "2", "num_decoder_layers is '2', but must be an integer"),
        ("sliding_window", 4, "sliding_window is not known for T5ForConditionalGeneration"),
    ],
)
def test_a_config_that_changes_the_function_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        family_of("T5ForConditionalGeneration").fields_of(SIZES | {key: value})


FORM = "--normalization RMSNorm --disable-bias-linear --softmax-scale 1.0 --position-embedding-type relative"
OWN = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (f"{FORM} --relu --t5-no-head-bias --logit-scale 0.25", None),
        (f"{FORM} --geglu {OWN} --relative-attention-num-buckets 16", None),
        (f"{FORM} --relu --logit-scale 0.25", "--t5-no-head-bias"),
        (f"{FORM} --relu --t5-no-head-bias --logit-scale 0.5", "--logit-scale is not set for MT5ForConditional"),
        (f"{FORM} --geglu {OWN} --logit-scale 0.25", "--logit-scale is"),
        (f"{FORM} {OWN}", "the activation "),
        (f"{FORM} --swiglu {OWN}", None),
        (f"{FORM} --quick-geglu {OWN}", "the activation "),
        (f"{FORM} --geglu {OWN} --qk-l2-norm", None),  # which needs rotary positions
        (FORM.replace("relative", "rope") + f" --geglu {OWN}", "--position-embedding-type is relative"),
        (FORM.replace("--softmax-scale 1.0", "") + f" --geglu {OWN}", "--softmax-scale is 1.0"),
        (FORM.replace("RMSNorm", "LayerNorm") + f" --geglu {OWN}", "--normalization is RMSNorm"),
    ],
)
def test_an_export_says_the_model_or_names_the_flag(flags: str, said: str | None) -> None:
    base = (
        "--encoder-num-layers 1 --decoder-num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 2 "
        "--seq-length 16 --decoder-seq-length 8 --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 39"
    )
    described = {"command_line": [*base.split(), *flags.split()], "model_family": "t5"}
    config = config_for_one_process(described, [], has_cuda=False)
    if said is None:
        assert choose_family(config, None).architecture == "T5ForConditionalGeneration"
    else:
        with pytest.raises(UserError, match=said):
            choose_family(config, None)
