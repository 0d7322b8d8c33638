"""Imports: the checkpoint, what it is to a run, memory, and what a failure leaves."""

import json
import shlex
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.oracles import make_model, save_model
from conversion.test_against_transformers import quiet
from safetensors.torch import load_file, save_file
from support.runs import train

from megatron.conversion import fp8_folder, importing
from megatron.conversion.hub_defaults import HUB_DEFAULTS
from megatron.conversion.importing import FLAGS, import_model, write_flags
from megatron.core.dist_checkpointing.checkpoint import open_checkpoint
from megatron.core.exceptions import UserError
from megatron.training.config.command_line import read_command_line
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model

TOKENIZER = Path(__file__).resolve().parents[1] / "data" / "golden" / "corpus" / "hf"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return save_model(make_model("llama 2", torch.float32), tmp_path_factory.mktemp("llama") / "theirs")


@pytest.fixture
def folder(theirs, tmp_path):
    return shutil.copytree(theirs, tmp_path / "theirs")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder, tmp_path, match):
    with pytest.raises(UserError, match=match):
        import_model(folder, tmp_path / "ours", build_model, log=quiet)
    assert not (tmp_path / "ours").exists()


def test_a_folder_of_a_run_is_not_imported_into(folder, tmp_path):
    """Else the run would go on from what was imported."""
    (tmp_path / "run" / "iter_0000020").mkdir(parents=True)
    with pytest.raises(UserError, match=r"run holds checkpoints of a run \(iter_0000020\); name another folder"):
        import_model(folder, tmp_path / "run", build_model, log=quiet)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["iter_0000020"]
    for _ in range(2):  # an import may be made again
        import_model(folder, tmp_path / "ours", build_model, log=quiet)


def test_a_folder_without_config_json_is_told_what_it_should_have(folder, tmp_path):
    (folder / "config.json").unlink()
    refused(folder, tmp_path, "theirs has no config.json; a model's folder has it beside model.safetensors or")
    refused(tmp_path / "nowhere", tmp_path, "nowhere: no such folder")
    refused(folder / "model.safetensors", tmp_path, "model.safetensors: this is a file, not a folder")


def test_an_unknown_architecture_comes_before_what_else_is_wrong(folder, tmp_path):
    change_config(folder, architectures=["FooForCausalLM"], model_type="foo", hidden_act="relu")
    (folder / "model.safetensors").unlink()
    refused(
        folder,
        tmp_path,
        r"theirs/config.json: architectures: FooForCausalLM is unknown; docs.*it; these are .*: Llama.*Qwen3Moe",
    )
    change_config(folder, architectures=..., model_type="foo")
    refused(folder, tmp_path, r"architectures is \[\] and model_type is 'foo'; architectures must name one of")
    change_config(folder, architectures=["LlamaForCausalLM"])
    refused(folder, tmp_path, "has neither model.safetensors nor model.safetensors.index.json")


CONFIGS: dict[str, dict[str, Any]] = {
    r"theirs/config.json: architectures: BlenderForCausalLM is unknown; docs.*it; these are known .*: LlamaFor": {
        "architectures": ["BlenderForCausalLM"]
    },
    r"theirs/config.json: architectures is \[\] and model_type is 'llama'; architectures must name one of LlamaFor": {
        "architectures": []
    },
    "theirs/config.json: architectures is MistralForCausalLM, which has model_type 'mistral', but model_type is 'lla": {
        "architectures": ["MistralForCausalLM"]
    },
    "theirs/config.json: hidden_act is 'relu'; silu, swish, gelu, gelu_py": {"hidden_act": "relu"},
    "theirs/config.json: num_attention_heads is 0; it must be at least 1": {"num_attention_heads": 0},
    "theirs/config.json: rms_norm_eps is nan, but must be a number": {"rms_norm_eps": float("nan")},
    "theirs/config.json: num_hidden_layers is '3', but must be an integer": {"num_hidden_layers": "3"},
    "theirs/config.json: quantization_config is not known for LlamaForCausalLM": {"quantization_config": {"bits": 4}},
    "theirs/config.json: rope_parameters has rope_type 'ntk'; default, linear, llama3, yarn, dynamic, longrope are": {
        "rope_parameters": {"rope_type": "ntk", "factor": 2.0}
    },
    "theirs/config.json: rope_parameters has parameters for each type of layer": {
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}}
    },
    r"model.safetensors: .*q_proj.weight has shape \[64, 64\], but config.json needs \[128, 64\]": {"head_dim": 32},
    "theirs/config.json: vocab_size is missing; it must be an integer": {"vocab_size": ...},
}


@pytest.mark.parametrize("said", CONFIGS)
def test_a_config_that_cannot_be_had(said, folder, tmp_path):
    change_config(folder, **CONFIGS[said])
    refused(folder, tmp_path, said)


def test_everything_that_is_wrong_is_said_at_once(folder, tmp_path):
    change_config(folder, hidden_act="relu", strange_key=3)
    refused(folder, tmp_path, r"strange_key is not known for LlamaForCausalLM\n.*hidden_act is 'relu'; silu, ")


def test_an_unknown_key_may_be_ignored(folder, tmp_path):
    change_config(folder, strange_key=3)
    import_model(folder, tmp_path / "ours", build_model, ignored_keys=["strange_key"], log=quiet)


def test_a_missing_tensor_an_extra_one_and_one_of_numbers_in_few_bits_are_named(folder, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

    change_tensors(folder, change)
    refused(folder, tmp_path, "model.layers.1.mlp.up_proj.weight is missing")
    refused(folder, tmp_path, "the model of config.json has no tensor model.layers.3.mlp.up_proj.weight")
    refused(folder, tmp_path, "lm_head.weight is torch.int8; quantized weights are unsupported")


def test_a_head_that_is_stored_beside_the_embedding_it_is(folder, tmp_path):
    change_config(folder, tie_word_embeddings=True)
    refused(folder, tmp_path, "lm_head.weight and model.embed_tokens.weight differ, but tie_word_embeddings in")
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    import_model(folder, tmp_path / "ours", build_model, log=quiet)


def test_constants_of_old_releases_are_left_out_and_told(folder, tmp_path):
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    said = []
    import_model(folder, tmp_path / "ours", build_model, log=said.append)
    assert any("left out" in line and "rotary_emb.inv_freq" in line for line in said)


def test_values_that_make_no_model_are_named_with_their_file(folder: Path, tmp_path: Path) -> None:
    """Rules translate each key alone; flags are checked together."""
    change_config(folder, num_key_value_heads=3)
    with pytest.raises(UserError, match=r"theirs/config.json: as flags: --num-query-groups 3 does not divide --num-at"):
        import_model(folder, tmp_path / "ours", build_model, log=quiet)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float, folder: Path, tmp_path: Path) -> None:
    change_tensors(folder, lambda t: t["model.layers.1.mlp.up_proj.weight"][3].fill_(bad))
    with pytest.raises(
        UserError, match=r"model.safetensors: model.layers.1.mlp.up_proj.weight has values that are NaN"
    ):
        import_model(folder, tmp_path / "ours", build_model, log=quiet)
    assert list((tmp_path / "ours").iterdir()) == []


def test_weights_that_do_not_fit_the_type_are_refused(folder: Path, tmp_path: Path) -> None:
    change_tensors(folder, lambda t: t["model.layers.1.mlp.up_proj.weight"][3].fill_(1e6))
    with pytest.raises(UserError, match=r"up_proj.weight has values .* as float16 \(it is stored as float32\)"):
        import_model(folder, tmp_path / "ours", build_model, dtype=torch.float16, log=quiet)
    import_model(folder, tmp_path / "ours", build_model, dtype=torch.bfloat16, log=quiet)


def test_an_import_is_verified_or_removed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: another default of an absent key than transformers has."""
    done = import_model(folder, tmp_path / "ours", build_model, verify=True, log=quiet)
    assert done.comparison is not None and done.comparison.difference < 1e-5
    change_config(folder, rms_norm_eps=...)
    monkeypatch.setitem(HUB_DEFAULTS["llama"], "rms_norm_eps", 0.5)
    with pytest.raises(UserError, match=r"theirs: transformers computes other logits than this model"):
        import_model(folder, tmp_path / "wrong", build_model, verify=True, log=quiet)
    assert not list((tmp_path / "wrong").iterdir())


def test_damage_that_shows_while_tensors_are_read_leaves_nothing(folder, tmp_path, monkeypatch):
    real = importing.open_folder

    def open_then_cut(path):
        opened = real(path)
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        return opened

    monkeypatch.setattr(importing, "open_folder", open_then_cut)
    with pytest.raises(UserError, match="bytes are missing"):
        import_model(folder, tmp_path / "ours", build_model, log=quiet)
    assert list((tmp_path / "ours").iterdir()) == []


def test_types_are_kept_or_changed(folder, tmp_path):
    change_tensors(folder, lambda t: t.update({name: w.bfloat16() for name, w in t.items() if "mlp" in name}))
    for dtype, expected in ((None, {torch.float32, torch.bfloat16}), (torch.float16, {torch.float16})):
        saved = import_model(folder, tmp_path / str(dtype), build_model, dtype=dtype, log=quiet).saved
        catalogue = open_checkpoint(saved.folder).catalogue
        assert {found[0].chunk.dtype for found in catalogue.values()} == expected


def test_files_of_a_size(folder, tmp_path):
    saved = import_model(folder, tmp_path / "ours", build_model, file_bytes=50_000, log=quiet).saved
    sizes = [path.stat().st_size for path in saved.folder.glob("*.safetensors")]
    assert len(sizes) > 5 and max(sizes) < 60_000


def test_the_vocabulary_of_the_model_may_be_larger_than_the_tokenizers(folder, tmp_path):
    """600 ids, 640 rows: all of them are entries of the model, as they are for transformers."""
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    rows = torch.randn(2, 640, 64)
    change_tensors(folder, lambda t: t.update({"model.embed_tokens.weight": rows[0], "lm_head.weight": rows[1]}))
    change_config(folder, vocab_size=640)
    done = import_model(folder, tmp_path / "ours", build_model, log=quiet)
    assert done.flags[-2:] == ["--vocab-size", "640"]
    assert (tmp_path / "ours" / "tokenizer" / "tokenizer.json").is_file()
    trained = load_trained_model(build_model, tmp_path / "ours", log=quiet)
    assert trained.tokenizer.vocab_size == 600
    assert trained.model(torch.tensor([[639, 3]])).shape == (1, 2, 640)
    trained_weight = dict(trained.model.named_parameters())["output_layer.weight"]
    assert torch.equal(trained_weight[:640], rows[1])


def test_a_tokenizer_of_more_ids_than_the_model_has_rows(folder, tmp_path):
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    said = []
    done = import_model(folder, tmp_path / "ours", build_model, log=said.append)
    assert "NullTokenizer" in done.flags and any("has 600 ids but the model has 99" in line for line in said)


def test_what_an_import_wrote_is_begun_from_and_not_gone_on_with(folder, tmp_path, capsys):
    """Every way that the refusal names works."""
    ours = tmp_path / "ours"
    flags = shlex.join(import_model(folder, ours, build_model, log=quiet).flags)
    flags += " --seq-length 16 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data --eval-iters 0"
    with pytest.raises(UserError) as refusal:
        train(f"--load {ours} {flags}", base="")
    said = str(refusal.value)
    assert f"--load {ours}: this is a release checkpoint, weights without optimizer state" in said
    assert f"--pretrained-checkpoint {ours} " in said and "--finetune" in said
    capsys.readouterr()
    for way in (f"--pretrained-checkpoint {ours} --load {tmp_path / 'new'}", f"--load {ours} --finetune"):
        assert len(train(f"{way} {flags}", base="").steps) == 1
        assert "loaded checkpoint" in capsys.readouterr().out


def test_no_more_than_a_tensor_is_in_memory(folder, tmp_path, monkeypatch):
    """Each is read when it is written: at any time one is there, and the one before it while its last block is."""
    alive = []
    real = fp8_folder.read_tensor

    def read(place):
        alive[:] = [reference for reference in alive if reference() is not None]
        assert len(alive) <= 1
        tensor = real(place)
        alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(fp8_folder, "read_tensor", read)
    import_model(folder, tmp_path / "ours", build_model, dtype=torch.bfloat16, log=quiet)
    assert alive


def test_a_foreign_name_gives_no_flags(tmp_path):
    """The name of a file or a token may look like flags, like YAML, or like commands of a shell."""
    names = [
        "my model --spec os abort",
        "--spec=os abort",
        "a\nspec: [os, abort]",
        "$(touch x)",
        "'",
        '"',
        "# x",
        "a: b",
    ]
    for name in names:
        write_flags(tmp_path, ["--num-layers", "2", f"--tokenizer-model={name}", "--vocab-size", "9"])
        line = read_command_line(["--config", str(tmp_path / FLAGS)])
        assert not line.problems and line.given.keys() == {"num_layers", "tokenizer_model", "vocab_size", "config_file"}
        assert (line.values["num_layers"], line.values["tokenizer_model"], line.values["vocab_size"]) == (2, name, 9)
