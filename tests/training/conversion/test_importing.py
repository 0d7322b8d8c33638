"""Imports: what is left behind when something is wrong, what the checkpoint is to a run, memory."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import train
from training.conversion.oracles import make_model, save_model
from training.conversion.test_against_transformers import quiet

from megatron.core.dist_checkpointing.checkpoint import open_checkpoint
from megatron.core.exceptions import UserError
from megatron.training.conversion.families import family_of
from megatron.training.conversion.importing import import_model
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model

TOKENIZER = Path(__file__).resolve().parents[2] / "data" / "golden" / "corpus" / "hf"


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
        import_model(folder, tmp_path / "ours", build_model, say=quiet)
    assert not (tmp_path / "ours").exists()


def test_a_folder_of_a_run_is_not_imported_into(folder, tmp_path):
    """Else the run would go on from what was imported."""
    (tmp_path / "run" / "iter_0000020").mkdir(parents=True)
    with pytest.raises(UserError, match=r"run holds checkpoints of a run \(iter_0000020\); name another folder"):
        import_model(folder, tmp_path / "run", build_model, say=quiet)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["iter_0000020"]
    for _ in range(2):  # an import may be made again
        import_model(folder, tmp_path / "ours", build_model, say=quiet)


def test_a_folder_without_config_json_is_told_what_it_should_have(folder, tmp_path):
    (folder / "config.json").unlink()
    refused(folder, tmp_path, "theirs: no config.json is there; the folder of a model has it beside model.safetensors")
    refused(tmp_path / "nowhere", tmp_path, "nowhere: no config.json is there")


def test_an_unknown_architecture_comes_before_what_else_is_wrong(folder, tmp_path):
    change_config(folder, architectures=["FooForCausalLM"], model_type="foo", hidden_act="gelu")
    (folder / "model.safetensors").unlink()
    refused(
        folder, tmp_path, "theirs/config.json: FooForCausalLM: not known; LlamaForCausalLM, .*Qwen3MoeForCausalLM are"
    )
    change_config(folder, architectures=..., model_type="foo")
    refused(folder, tmp_path, r"architectures is \[\] and model_type 'foo'; one name is needed, of LlamaForCausalLM, ")
    change_config(folder, architectures=["LlamaForCausalLM"])
    refused(folder, tmp_path, "neither model.safetensors nor model.safetensors.index.json is there")


CONFIGS = {
    "BlenderForCausalLM: not known; LlamaForCausalLM, MistralForCausalLM, Qwen2": {
        "architectures": ["BlenderForCausalLM"]
    },
    r"architectures is \[\] and model_type 'llama'; one name is needed, of LlamaForCausalLM, Mistral": {
        "architectures": []
    },
    "config.json has no hidden_size": {"hidden_size": ...},
    "hidden_act 'gelu' cannot be had here; 'silu' can": {"hidden_act": "gelu"},
    "quantization_config is not known for LlamaForCausalLM": {"quantization_config": {"bits": 4}},
    "rope scaling longrope cannot be had here; default, linear, llama3, yarn can": {
        "rope_parameters": {"rope_type": "longrope", "factor": 2.0}
    },
    "mscale of rope scaling yarn cannot": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
    "rope_theta 10000.5 cannot be had here; 10000 can": {"rope_parameters": {"rope_theta": 10000.5}},
    r"q_proj.weight has shape \[64, 64\]; config.json makes it \[128, 64\]": {"head_dim": 32},
}


@pytest.mark.parametrize("said", CONFIGS)
def test_a_config_that_cannot_be_had(said, folder, tmp_path):
    change_config(folder, **CONFIGS[said])
    refused(folder, tmp_path, said)


def test_a_config_as_qwen_3_with_experts_is_published():
    """As hubs have it, which is not as today's transformers writes it."""
    published = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    family = family_of("Qwen3MoeForCausalLM")
    values = family.values(published)
    assert (values["num_moe_experts"], values["moe_router_topk"], values["moe_layer_freq"]) == (128, 8, 1)
    assert family.values(published | {"sliding_window": 4096}) == values, "a window that is switched off"
    for name in ("num_experts", "num_local_experts"):
        either = {key: value for key, value in published.items() if key != "num_experts"} | {name: 7}
        assert family.values(either)["num_moe_experts"] == 7
    with pytest.raises(UserError, match="use_sliding_window True cannot be had here"):
        family.values(published | {"sliding_window": 4096, "use_sliding_window": True})
    with pytest.raises(UserError, match=r"config\.json has no num_experts"):
        family.values({key: value for key, value in published.items() if key != "num_experts"})


def test_everything_that_is_wrong_is_said_at_once(folder, tmp_path):
    change_config(folder, hidden_act="gelu", strange_key=3)
    refused(folder, tmp_path, r"strange_key is not known for LlamaForCausalLM\n.*hidden_act 'gelu' cannot be had")


def test_a_key_may_be_waived(folder, tmp_path):
    change_config(folder, strange_key=3)
    import_model(folder, tmp_path / "ours", build_model, waived=["strange_key"], say=quiet)


def test_a_missing_tensor_an_extra_one_and_one_of_numbers_in_few_bits_are_named(folder, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

    change_tensors(folder, change)
    refused(folder, tmp_path, "model.layers.1.mlp.up_proj.weight is missing")
    refused(folder, tmp_path, "model.layers.3.mlp.up_proj.weight is no tensor of this model")
    refused(folder, tmp_path, "lm_head.weight is torch.int8: quantized")


def test_a_head_that_is_stored_beside_the_embedding_it_is(folder, tmp_path):
    change_config(folder, tie_word_embeddings=True)
    refused(folder, tmp_path, r"lm_head.weight is model.embed_tokens.weight \(tie_word_embeddings\), but they differ")
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    import_model(folder, tmp_path / "ours", build_model, say=quiet)


def test_constants_of_old_releases_are_left_out_and_told(folder, tmp_path):
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    said = []
    import_model(folder, tmp_path / "ours", build_model, say=said.append)
    assert any("left out" in line and "rotary_emb.inv_freq" in line for line in said)


def test_pickles_are_refused(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    refused(folder, tmp_path, "neither model.safetensors nor model.safetensors.index.json is there")
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    refused(folder, tmp_path, "pytorch_model.bin: pickled weights run code when they are read, so they are not")


def test_an_index_must_not_lead_out_of_its_folder(folder, tmp_path):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../other/x.safetensors"}}))
    refused(folder, tmp_path, "'../other/x.safetensors' is no name of a file in this folder")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    refused(folder, tmp_path, "w should be in model.safetensors, and is not")


def test_damage_that_shows_while_tensors_are_read_leaves_nothing(folder, tmp_path, monkeypatch):
    from megatron.training.conversion import importing

    real = importing.open_folder

    def open_then_cut(path):
        opened = real(path)
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        return opened

    monkeypatch.setattr(importing, "open_folder", open_then_cut)
    with pytest.raises(UserError, match="bytes are missing"):
        import_model(folder, tmp_path / "ours", build_model, say=quiet)
    assert list((tmp_path / "ours").iterdir()) == []


def test_types_are_kept_or_changed(folder, tmp_path):
    change_tensors(folder, lambda t: t.update({name: w.bfloat16() for name, w in t.items() if "mlp" in name}))
    for dtype, expected in ((None, {torch.float32, torch.bfloat16}), (torch.float16, {torch.float16})):
        saved = import_model(folder, tmp_path / str(dtype), build_model, dtype=dtype, say=quiet).saved
        catalogue = open_checkpoint(saved.folder).catalogue
        assert {found[0].chunk.dtype for found in catalogue.values()} == expected


def test_files_of_a_size(folder, tmp_path):
    saved = import_model(folder, tmp_path / "ours", build_model, file_bytes=50_000, say=quiet).saved
    sizes = [path.stat().st_size for path in saved.folder.glob("*.safetensors")]
    assert len(sizes) > 5 and max(sizes) < 60_000


def test_the_vocabulary_of_the_model_may_be_larger_than_the_tokenizers(folder, tmp_path):
    """600 ids, 640 rows: all of them are entries of the model, as they are for transformers."""
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    rows = torch.randn(2, 640, 64)
    change_tensors(folder, lambda t: t.update({"model.embed_tokens.weight": rows[0], "lm_head.weight": rows[1]}))
    change_config(folder, vocab_size=640)
    done = import_model(folder, tmp_path / "ours", build_model, say=quiet)
    assert done.flags[-2:] == ["--vocab-size", "640"]
    assert (tmp_path / "ours" / "tokenizer" / "tokenizer.json").is_file()
    trained = load_trained_model(build_model, tmp_path / "ours", say=quiet)
    assert trained.tokenizer.vocab_size == 600
    assert trained.model(torch.tensor([[639, 3]])).shape == (1, 2, 640)
    trained_weight = dict(trained.model.named_parameters())["output_layer.weight"]
    assert torch.equal(trained_weight[:640], rows[1])


def test_a_tokenizer_of_more_ids_than_the_model_has_rows(folder, tmp_path):
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    said = []
    done = import_model(folder, tmp_path / "ours", build_model, say=said.append)
    assert "NullTokenizer" in done.flags and any("has 600 ids, the model 99" in line for line in said)


def test_what_an_import_wrote_is_begun_from_and_not_gone_on_with(folder, tmp_path, capsys):
    """Every way that the refusal names works."""
    ours = tmp_path / "ours"
    flags = shlex.join(import_model(folder, ours, build_model, say=quiet).flags)
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
    import weakref

    from megatron.training.conversion import importing

    alive = []
    real = importing.read_tensor

    def read(place):
        alive[:] = [reference for reference in alive if reference() is not None]
        assert len(alive) <= 1
        tensor = real(place)
        alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(importing, "read_tensor", read)
    import_model(folder, tmp_path / "ours", build_model, dtype=torch.bfloat16, say=quiet)
    assert alive
