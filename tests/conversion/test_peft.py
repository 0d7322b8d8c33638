"""PEFT's adapters in and out, and merged models, beside PEFT itself."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.oracles import make_model, save_model
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.runs import state_at_start, train
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from megatron.conversion.exporting import export_model
from megatron.conversion.families import FAMILIES
from megatron.conversion.hub_run import load_hub_weights
from megatron.conversion.importing import import_model, open_hub_model
from megatron.conversion.merging import config_of_adapters, merge_adapters
from megatron.conversion.model import build_on
from megatron.conversion.peft import ADAPTER_CONFIG, ADAPTER_MODEL, export_adapters, import_adapters
from megatron.core.adapters.attach import add_adapters
from megatron.core.dist_checkpointing.checkpoint_selection import open_newest
from megatron.core.dist_checkpointing.chunk import model_chunks
from megatron.core.dist_checkpointing.planning import match
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.exceptions import UserError
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model

CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama 3.1", {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}),
    "llama, DoRA": ("llama 3.1", {"target_modules": ["q_proj", "k_proj", "o_proj", "up_proj"], "use_dora": True}),
    "qwen 2, rsLoRA": ("qwen 2", {"target_modules": ["k_proj", "down_proj"], "use_rslora": True}),
    "gpt 2": ("gpt 2", {"target_modules": ["c_attn", "attn.c_proj", "c_fc"]}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
}


def silent(sentence: str) -> None:
    """The log function of these tests."""


def tokens() -> Tensor:
    return torch.randint(90, (2, 12), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    output = model.eval()(tokens())
    found: Tensor = getattr(output, "logits", output)
    return found


class Case:
    """A tiny model of the hub, PEFT's adapters of it that were trained for a step, and both in our checkpoints."""

    def __init__(self, name: str, place: Path) -> None:
        model, options = CASES[name]
        self.base, self.adapters = place / "base", place / "theirs"
        save_model(make_model(model, torch.float32), self.base)
        self.peft: Any = get_peft_model(self.fresh(), PeftConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options))
        self.peft.train()
        optimizer = torch.optim.SGD([p for p in self.peft.parameters() if p.requires_grad], lr=1.0)
        for _ in range(2):  # B is zero in the first step, and A has no gradient
            loss = cross_entropy(self.peft(tokens()).logits.flatten(0, 1), tokens().roll(-1, 1).flatten())
            loss.backward()
            optimizer.step()
        self.peft.save_pretrained(self.adapters)
        self.ours, self.flags = place / "ours", []
        _, self.flags = import_adapters(self.adapters, self.ours, self.base, build_model, log=silent)

    def fresh(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.base, attn_implementation="eager", dtype=torch.float32)


QUICK = ("llama, DoRA", "gpt 2")


@pytest.fixture(
    scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("peft"))


def our_model(case: Case, place: Path) -> nn.Module:
    """The base and the adapters in our model, not merged."""
    import_model(case.base, place, build_model, log=silent)
    base, adapters = open_newest(place, None, silent), open_newest(case.ours, None, silent)
    config = config_of_adapters(adapters)
    model = build_on(torch.device("cpu"), config, build_model, 99)
    add_adapters(model, config.adapters, config.transformer)
    catalogue = {**base.catalogue, **adapters.catalogue}
    chunks = list(model_chunks(model, lambda info: ()))
    for source in (base, adapters):
        fill_tensors(source, match([c for c in chunks if c.name in source.catalogue], source.catalogue))
    assert all(chunk.name in catalogue for chunk in chunks)
    return model


def test_our_model_with_their_adapters_gives_their_logits(case: Case, tmp_path: Path) -> None:
    expected = logits(case.peft)
    assert (expected - logits(case.fresh())).abs().max() > 1e-3
    torch.testing.assert_close(logits(our_model(case, tmp_path)), expected, rtol=1e-4, atol=2e-5)


def test_their_files_come_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    export_adapters(case.ours, tmp_path / "back", build_model, log=silent)
    found, expected = load_file(tmp_path / "back" / ADAPTER_MODEL), load_file(case.adapters / ADAPTER_MODEL)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    again = PeftModel.from_pretrained(case.fresh(), tmp_path / "back")
    assert torch.equal(logits(again), logits(case.peft))


def test_the_merged_model_is_theirs(case: Case, tmp_path: Path) -> None:
    merge_adapters(case.ours, tmp_path / "merged", build_model, log=silent)
    export_model(tmp_path / "merged", tmp_path / "hub", build_model, log=silent)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", attn_implementation="eager", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(case.fresh(), case.adapters).merge_and_unload()
    expected = theirs.state_dict()
    assert merged.state_dict().keys() == expected.keys()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_merged_model_and_adapters_load_with_their_tokenizer(llama: Case, tmp_path: Path) -> None:
    """Both give the logits of PEFT, and neither needs a folder that the merge has deleted."""
    write_tokenizer(llama.base / "tokenizer.json")
    import_adapters(llama.adapters, tmp_path / "adapters", llama.base, build_model)
    merge_adapters(tmp_path / "adapters", tmp_path / "merged", build_model, log=silent)
    merged = load_trained_model(build_model, tmp_path / "merged", log=silent)
    adapted = load_trained_model(build_model, tmp_path / "adapters", log=silent, load_hub=load_hub_weights)
    assert merged.tokenizer.tokenize("b c") == adapted.tokenizer.tokenize("b c") == [2, 3]
    theirs = logits(llama.peft)
    for model in (merged.model, adapted.model):
        torch.testing.assert_close(logits(model)[..., : theirs.shape[-1]], theirs, rtol=1e-4, atol=2e-5)
    llama.base.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="no such folder; name the adapted model with --base"):
        load_trained_model(build_model, tmp_path / "adapters", log=silent, load_hub=load_hub_weights, changes=MOVED)
    (tmp_path / "moved").rename(llama.base)
    with pytest.raises(UserError, match="release is a whole model without adapters; leave the flag out"):
        load_trained_model(build_model, tmp_path / "merged", log=silent, base=str(llama.base))
    (llama.base / "tokenizer.json").unlink()


MOVED = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "89"]


def write_tokenizer(path: Path) -> None:
    """Words that are single letters, with the ids 1 to 26."""
    words = {"<eos>": 0} | {chr(97 + n): n + 1 for n in range(26)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path))


# ---------------------------------------------------------------------------------------------------------------------
# Adapters that our runs train

RUN = (
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-1 --num-workers 0 --log-interval 100 --seq-length 16 "
    "--eval-iters 0 --mock-data --train-iters 2"
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "--use-dora", "--lora-target-modules linear_qkv gate_proj up_proj"])
def test_adapters_of_fused_layers(tmp_path: Path, kind: str) -> None:
    """One adapter of linear_qkv becomes three of PEFT's, with the same logits as the merged model."""
    base, run = save_model(make_model("llama 3.1", torch.float32), tmp_path / "base"), tmp_path / "run"
    train(f"--lora-rank 4 {kind} --save {run}", base=f"{RUN} {words_of_hub(base)}")
    export_adapters(run, tmp_path / "peft", build_model, log=silent)
    merge_adapters(run, tmp_path / "merged", build_model, log=silent)
    export_model(tmp_path / "merged", tmp_path / "hub", build_model, log=silent)
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    before = logits(plain)
    theirs = logits(PeftModel.from_pretrained(plain, tmp_path / "peft"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", attn_implementation="eager", dtype=torch.float32)
    assert (theirs - before).abs().max() > 1e-2
    torch.testing.assert_close(logits(merged), theirs, rtol=1e-4, atol=2e-5)


def words_of_hub(folder: Path) -> str:
    """The flags of a run that starts from a folder of the hub."""
    return f"--load-hf {folder} {' '.join(open_hub_model(folder, folder, (), FAMILIES, silent).flags)}"


@pytest.mark.slow
def test_a_run_goes_on_with_their_adapters(tmp_path: Path) -> None:
    case = Case("llama, DoRA", tmp_path)
    flags = f"{RUN} {words_of_hub(case.base)} {' '.join(case.flags)} --load {case.ours} --finetune"
    start = state_at_start([train("", base=flags)])
    theirs = load_file(case.adapters / ADAPTER_MODEL)
    name = "self_attn.o_proj.lora_magnitude_vector"
    ours = start["weight decoder.layers.1.self_attention.linear_proj.adapters.whole.magnitude"]
    assert torch.equal(ours, theirs[f"base_model.model.model.layers.1.{name}"])


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("bad"))


def changed(case: Case, place: Path, keys: dict[str, Any], tensors: dict[str, Tensor | None]) -> Path:
    """A copy of PEFT's folder with other keys and tensors; None leaves a tensor out."""
    shutil.copytree(case.adapters, place)
    config = json.loads((place / ADAPTER_CONFIG).read_text())
    (place / ADAPTER_CONFIG).write_text(json.dumps(config | keys))
    found = {**load_file(place / ADAPTER_MODEL), **tensors}
    save_file({name: value for name, value in found.items() if value is not None}, place / ADAPTER_MODEL)
    return place


_OF_LAYER = "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("keys", "tensors", "problem"),
    [
        ({"peft_type": "LOHA"}, {}, "peft_type is 'LOHA'; only 'LORA' can be imported"),
        ({"rank_pattern": {"q_proj": 8}}, {}, "rank_pattern is {'q_proj': 8}, which adapters here do not have"),
        ({"bias": "lora_only"}, {}, "bias is 'lora_only', which adapters here do not have"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save is ['lm_head'], which adapters here do not have"),
        (
            {"init_lora_weights": "pissa"},
            {},
            "init_lora_weights is 'pissa', which adapters here do not have; merge them",
        ),
        ({"kasa_config": {"beta": 1e-4}}, {}, "kasa_config is {'beta': 0.0001}, which adapters here do not have"),
        ({}, {f"{_OF_LAYER}.other.lora_A.weight": torch.zeros(4, 64)}, "other.lora_A.weight is of no layer that can"),
        (
            {},
            {f"{_OF_LAYER}.self_attn.o_proj.lora_B.weight": torch.zeros(60, 4)},
            "o_proj.lora_B.weight has shape [60, 4]; this model and r 4 need [64, 4]",
        ),
        ({"r": 8}, {}, "has shape [4, "),
        (
            {},
            {
                f"{_OF_LAYER}.self_attn.o_proj.lora_A.weight": None,
                f"{_OF_LAYER}.self_attn.o_proj.lora_B.weight": None,
            },
            "decoder.layers.0.self_attention.linear_proj has no adapter, but other layers of its kind have one",
        ),
    ],
)
def test_files_that_cannot_be_imported(
    llama: Case, tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Tensor | None], problem: str
) -> None:
    source = changed(llama, tmp_path / "source", keys, tensors)
    with pytest.raises(UserError) as raised:
        import_adapters(source, tmp_path / "ours", llama.base, build_model, log=silent)
    assert problem in str(raised.value)
    assert not (tmp_path / "ours").exists()


def test_merging_with_other_weights_is_refused(llama: Case, tmp_path: Path) -> None:
    other = save_model(make_model("qwen 2", torch.float32), tmp_path / "other")
    with pytest.raises(UserError, match="holds other weights than those that the adapters were trained with"):
        merge_adapters(llama.ours, tmp_path / "merged", build_model, base=other, log=silent)
