"""Exports to Megatron-LM, read by torch's own reader, and imported again."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from conversion.megatron_lm.test_torch_dist import read_by_torch
from conversion.megatron_runs import FLAGS, GOLDEN, same_bits, tensors_in
from conversion.saved_models import build_random, config_of, save_checkpoint
from support.runs import train

from megatron.conversion.megatron_lm.exporting import export_run
from megatron.conversion.megatron_lm.importing import ImportedRun, import_run
from megatron.conversion.megatron_lm.torch_archive import TorchArchive
from megatron.conversion.megatron_lm.torch_dist import DistFolder
from megatron.core.dist_checkpointing.chunk import model_chunks
from megatron.core.dist_checkpointing.writing import save
from megatron.core.exceptions import UserError
from megatron.training.inspection.run_description import describe_run
from pretrain_gpt import build_model


def quiet(text: str) -> None:
    pass


def imported(name: str, root: Path) -> ImportedRun:
    return import_run(GOLDEN / name, root, build_model, flags=FLAGS[name].split(), log=quiet)


@pytest.mark.parametrize(
    ("name", "iteration"),
    [("gpt2style_optim", 1), ("llamastyle_distopt_fully_reshardable", 1), ("moe_fully_reshardable", 2)],
)
def test_there_and_back(name: str, iteration: int, tmp_path: Path) -> None:
    """An import that is exported has the names, shapes and values that Megatron-LM wrote, but for padded rows."""
    ours = imported(name, tmp_path / "ours")
    # The MoE has Megatron-LM's own layers, which name norms before experts otherwise than Transformer Engine's.
    done = export_run(tmp_path / "ours", tmp_path / "theirs", is_local=name.startswith("moe"), log=quiet)
    assert done.folder == tmp_path / "theirs" / f"iter_{iteration:07d}" and done.with_optimizer
    golden, made = read_by_torch(GOLDEN / name / done.folder.name), read_by_torch(done.folder)
    missing = {key for key in made.keys() - golden.keys() if not key.startswith("optimizer.state.param.")}
    assert not missing and golden.keys() <= made.keys()
    for key, tensor in golden.items():
        if "word_embeddings" in key or "output_layer" in key:  # rows are padded to a multiple of 128
            assert made[key].shape == (128, tensor.shape[1]) and same_bits(made[key][: len(tensor)], tensor), key
        else:
            assert same_bits(made[key], tensor), key
    assert DistFolder(done.folder).objects.keys() >= {
        key for key in DistFolder(GOLDEN / name / done.folder.name).objects if "fc1._extra_state" in key
    }
    again = import_run(tmp_path / "theirs", tmp_path / "again", build_model, log=quiet)  # the flags are in it
    first, second = tensors_in(ours.saved.folder), tensors_in(again.saved.folder)
    assert first.keys() == second.keys() and all(same_bits(first[key], second[key]) for key in first)
    assert again.state == ours.state


def test_common_state_is_what_torch_loads(tmp_path: Path) -> None:
    imported("gpt2style_optim", tmp_path / "ours")
    folder = export_run(tmp_path / "ours", tmp_path / "theirs", log=quiet).folder
    common = torch.load(folder / "common.pt", weights_only=False)
    assert common["iteration"] == 1 and common["checkpoint_version"] == 3.0 and common["args"].num_layers == 2
    assert common["args"].consumed_train_samples == 4 and common["opt_param_scheduler"]["num_steps"] == 4
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [group["wd_mult"] for group in groups] == [1.0, 0.0] and groups[0]["step"] == 1.0
    assert TorchArchive(folder / "common.pt").load()["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    assert (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_layers_of_different_sizes_are_described_in_their_words(tmp_path: Path) -> None:
    """0.19.2 reads `ffn_hidden_size`, not `intermediate_size`, and takes widths that are null from its flags."""
    blocks = '{"attention":{"n_heads_in_group":2},"ffn":{"intermediate_size":40}},{"attention":{"no_op":true},"ffn":{}}'
    flags = f'--heterogeneous-layers-config-encoded-json {{"block_configs":[{blocks}]}}'
    save_checkpoint(flags, tmp_path / "ours")
    folder = export_run(tmp_path / "ours", tmp_path / "theirs", log=quiet).folder
    arguments = torch.load(folder / "common.pt", weights_only=False)["args"]
    there = {"no_op": False, "replace_with_linear": False}
    assert json.loads(arguments.heterogeneous_layers_config_encoded_json)["block_configs"] == [
        {"attention": there | {"num_query_groups": 1}, "ffn": there | {"ffn_hidden_size": 40}},
        {"attention": there | {"no_op": True, "num_query_groups": None}, "ffn": there | {"ffn_hidden_size": 128}},
    ]
    again = import_run(tmp_path / "theirs", tmp_path / "again", build_model, log=quiet)
    ours = next((tmp_path / "ours").glob("iter_*"))
    first, second = tensors_in(ours), tensors_in(again.saved.folder)
    assert first.keys() == second.keys() and all(same_bits(first[key], second[key]) for key in first)


def test_state_of_another_optimizer_is_left_behind_and_a_line_says_so(tmp_path: Path) -> None:
    """Muon: matrices have a momentum, all others the moments of Adam. Half of it would be a broken state."""
    config = config_of("")
    chunks = list(model_chunks(build_random(config), lambda info: ()))
    state = [
        dataclasses.replace(chunk, name=f"optimizer.{kind}.{chunk.name}")
        for chunk in chunks
        for kind in (("momentum_buffer",) if "linear" in chunk.name else ("exp_avg", "exp_avg_sq"))
    ]
    save(tmp_path / "ours", [*chunks, *state], step=1, common={}, config=describe_run(config), layout={})
    said: list[str] = []
    done = export_run(tmp_path / "ours", tmp_path / "theirs", log=said.append)
    assert not done.with_optimizer and not [name for name in DistFolder(done.folder).tensors if "optimizer" in name]
    assert len(said) == 1 and "there is optimizer.momentum_buffer.decoder.layers.0" in said[0], said


def test_a_moving_average_is_left_behind_and_the_state_of_adam_is_not(tmp_path: Path) -> None:
    train(f"--mock-data --train-iters 1 --ema-decay 0.9 --save {tmp_path / 'ours'}")
    said: list[str] = []
    done = export_run(tmp_path / "ours", tmp_path / "theirs", log=said.append)
    names = DistFolder(done.folder).tensors
    assert done.with_optimizer and [name for name in names if "exp_avg" in name]
    assert not [name for name in names if "ema" in name]
    assert any(line.startswith("left behind: the moving average of the weights (--ema-decay)") for line in said)


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full" / "x").mkdir(parents=True)
    with pytest.raises(UserError, match="full is not empty"):
        export_run(tmp_path, tmp_path / "full")
    with pytest.raises(UserError, match=r"--load .*none: no such folder"):
        export_run(tmp_path / "none", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--norm-placement sandwich", "the model has --norm-placement, without which"),
        ("--relu --logit-scale 2", "the model has --logit-scale, --relu, without which"),
        ("--softmax-scale 0.5", "the model has --softmax-scale, without which"),
        ("--exact-geglu", "the model has --exact-geglu, without which"),
    ],
)
def test_models_that_they_would_compute_otherwise_are_refused(flags: str, message: str, tmp_path: Path) -> None:
    save_checkpoint(flags, tmp_path / "ours")
    with pytest.raises(UserError, match=message):
        export_run(tmp_path / "ours", tmp_path / "theirs", log=quiet)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--position-embedding-type rope --rope-scaling-type llama3 --rope-scaling-factor 4", "--use-rope-scaling"),
        (
            "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-norm-topk-prob "
            "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-group-score-topk 2",
            "--moe-router-group-topk 1",
        ),
        ("--softmax-scale 0.25", "--hidden-size 32"),  # 1 / sqrt(16), the default
    ],
)
def test_what_they_compute_with_other_flags_is_exported(flags: str, words: str, tmp_path: Path) -> None:
    save_checkpoint(flags, tmp_path / "ours")
    export_run(tmp_path / "ours", tmp_path / "theirs", log=quiet)
    back = import_run(tmp_path / "theirs", tmp_path / "back", build_model, log=quiet)
    assert words in " ".join(back.flags) and "llama3" not in back.flags
