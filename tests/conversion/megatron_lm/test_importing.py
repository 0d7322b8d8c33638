"""Runs of Megatron-LM become checkpoints from which they go on."""

import argparse
import json
import pickle
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from conversion.megatron_lm.test_torch_dist import read_by_torch
from conversion.megatron_runs import FLAGS, GOLDEN, GPT2, LLAMA, MOE, same_bits, tensors_in
from support.runs import state_at_start, train, write_documents
from torch import Tensor

from megatron.conversion.megatron_lm.importing import ImportedRun, find_folder, import_run
from megatron.core.exceptions import UserError
from megatron.training.config.command_line import read_command_line
from pretrain_gpt import build_model

DATA = "--split 1,0,0 --eval-iters 0 --num-workers 0 --log-interval 100 --data-path"


def imported(name: str, root: Path, more: str = "", **keywords: Any) -> ImportedRun:
    flags = f"{FLAGS[name]} {more}".split()
    return import_run(GOLDEN / name, root, build_model, flags=flags, log=lambda text: None, **keywords)


def expected(name: str, folder: str = "iter_0000001") -> dict[str, Tensor]:
    """Their tensors by our names, as torch reads them: layers apart, norms under names of their own."""
    found = {}
    for key, tensor in read_by_torch(GOLDEN / name / folder).items():
        kind, weight = "", key
        if key.startswith("optimizer.state."):
            kind, weight = key.removeprefix("optimizer.state.").split(".", 1)
        weight = weight.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        weight = weight.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        prefix = f"optimizer.{kind}." if kind else ""
        if ".layers." in weight:
            stack, rest = weight.split(".layers.")
            found |= {f"{prefix}{stack}.layers.{layer}.{rest}": part for layer, part in enumerate(tensor)}
        else:
            found[prefix + weight] = tensor
    return found


@pytest.mark.parametrize("name", ["gpt2style_optim", "llamastyle_distopt_fully_reshardable"])
def test_every_element_of_the_golden_checkpoints(name: str, tmp_path: Path) -> None:
    done = imported(name, tmp_path)
    ours, theirs = tensors_in(done.saved.folder), expected(name)
    masters = {key for key in theirs if key.startswith("optimizer.param.")}
    assert ours.keys() == theirs.keys() - masters  # float32 weights are their own main weights
    for key, tensor in ours.items():
        assert same_bits(tensor, theirs[key]), key
    assert done.state is not None and done.state.consumed_train_samples == 4


def test_rows_that_pad_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    done = imported("gpt2style_optim", tmp_path, "--vocab-size 100")
    ours, theirs = tensors_in(done.saved.folder), expected("gpt2style_optim")
    for name in ("embedding.word_embeddings.weight", "optimizer.exp_avg.embedding.word_embeddings.weight"):
        assert same_bits(ours[name], theirs[name][:101].clone())


def test_flat_buffers_hold_what_the_reshardable_format_holds(tmp_path: Path) -> None:
    """One optimizer was saved in both formats. Experts, a router with a bias, two kinds of layers, bfloat16."""
    first, second = (
        tensors_in(imported(name, tmp_path / name).saved.folder)
        for name in ("moe_dp_reshardable", "moe_fully_reshardable")
    )
    assert first.keys() == second.keys() and len(first) == 4 * 18 + 1
    for key, tensor in first.items():
        assert same_bits(tensor, second[key]), key
    weight = "decoder.layers.1.mlp.experts.linear_fc1.weight"
    assert first[weight].shape == (4, 2, 8, 16) and first[weight].dtype == torch.bfloat16
    assert same_bits(first[f"optimizer.param.{weight}"].to(torch.bfloat16), first[weight])


@pytest.mark.parametrize("name", ["gpt2style_optim", pytest.param("moe_dp_reshardable", marks=pytest.mark.slow)])
def test_the_run_goes_on(name: str, tmp_path: Path) -> None:
    """State, counts and order of the data are those of a run that has made these steps itself."""
    done = imported(name, tmp_path / "imported")
    assert done.state is not None
    step = done.state.iteration
    data = write_documents(tmp_path / "data", vocabulary=39)
    flags = f"{DATA} {data} --lr 1e-3 --train-iters {step + 2}"
    going = train(f"{flags} --load {tmp_path / 'imported'}", base=FLAGS[name])
    held = state_at_start([going])
    for key, tensor in tensors_in(done.saved.folder).items():
        assert torch.equal(held[key if key.startswith("optimizer.") else f"weight {key}"].flatten(), tensor.flatten())
    assert going.at_start["state"]["consumed_train_samples"] == 4 * step
    assert going.at_start["optimizer"]["update_count"] == step
    assert [record.iteration for record in going.steps] == [step + 1, step + 2]
    whole = train(flags, base=FLAGS[name])
    assert going.sample_ids == whole.sample_ids[step:]


def with_arguments(root: Path, change: Any = None) -> Path:
    """A checkpoint with the arguments, schedule and loss scale of a run, as training with Megatron-LM saves them."""
    folder = root / "iter_0000001"
    shutil.copytree(GOLDEN / "gpt2style_optim", root)
    common = torch.load(folder / "common.pt", weights_only=False)
    common["args"] = argparse.Namespace(
        num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32, max_position_embeddings=32,
        tokenizer_type="NullTokenizer", vocab_size=127, padded_vocab_size=128, micro_batch_size=1, global_batch_size=4,
        swiglu=False, add_bias_linear=True, group_query_attention=False, num_query_groups=1, ffn_hidden_size=256,
        kv_channels=16, lr=3e-4, min_lr=1e-5, lr_decay_style="cosine", train_iters=10, seed=77, data_path=["a"],
        consumed_train_samples=4, consumed_valid_samples=8, skipped_train_samples=0, rank=0, world_size=8,
        tensor_model_parallel_size=4, attention_backend=PurePosixPath("a/record"),
        params_dtype=torch.float32, num_experts=None, own_flag_of_a_script="x",
    )  # fmt: skip
    common["opt_param_scheduler"] = {
        "max_lr": 3e-4, "lr_warmup_steps": 0, "num_steps": 4, "lr_decay_style": "cosine", "lr_decay_steps": 40,
        "min_lr": 1e-5, "start_wd": 0.01, "end_wd": 0.01, "wd_incr_style": "constant", "wd_incr_steps": 40,
    }  # fmt: skip
    common["num_floating_point_operations_so_far"] = 1e6
    if change is not None:
        change(common)
    torch.save(common, folder / "common.pt")
    return root


def test_flags_counts_and_schedule_come_from_the_checkpoint(tmp_path: Path) -> None:
    source = with_arguments(tmp_path / "theirs")
    done = import_run(source, tmp_path / "ours", build_model, log=lambda text: None)
    written = read_command_line(["--config", str(tmp_path / "ours" / "flags.yaml")])
    assert not written.problems and written.values | {"config_file": None} == read_command_line(done.flags).values
    assert "--seed 77" in " ".join(done.flags) and "--tensor-model-parallel-size" not in done.flags
    common = json.loads((done.saved.folder / "manifest.json").read_text())["common"]
    assert common["train_state"] == {
        "iteration": 1,
        "consumed_train_samples": 4,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 8,
        "consumed_tokens": 128,
        "floating_point_operations_so_far": 1e6,
    }
    assert common["scheduler"]["lr_decay_steps"] == 40 and common["optimizer"]["update_count"] == 1
    data = write_documents(tmp_path / "data")
    going = train(f"{DATA} {data} --load {tmp_path / 'ours'} --exit-interval 2", base=" ".join(done.flags))
    assert going.at_start["scheduler"]["num_steps"] == 4 and going.steps[0].iteration == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--num-layers 3", "decoder.layers.2.input_layernorm.weight has shape"),
        ("--num-layers 1", "holds 2 layers, the model of these flags has 1"),
        ("--hidden-size 32", "has shape"),
        ("--vocab-size 128", "embedding.word_embeddings.weight has shape"),
        ("--untie-embeddings-and-output-weights", "has no output_layer.weight"),
        ("--normalization RMSNorm", "the model of these flags has no decoder"),
    ],
)
def test_another_model_is_refused_by_name(more: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        imported("gpt2style_optim", tmp_path / "ours", more)
    assert not (tmp_path / "ours").exists()


def test_content_of_another_iteration_is_refused(tmp_path: Path) -> None:
    source = with_arguments(tmp_path / "theirs", lambda common: common.update(iteration=7))
    with pytest.raises(UserError, match="its folder says iteration 1, its content 7"):
        import_run(source, tmp_path / "ours", build_model)


def test_nothing_of_a_hostile_checkpoint_runs(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    source = with_arguments(tmp_path / "theirs", lambda common: common.update(rng_state=Hostile()))
    with pytest.raises(UserError, match=r"common.pt: it names builtins.exec, .*nothing of it was executed"):
        import_run(source, tmp_path / "ours", build_model)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "ours").exists()


def test_moments_that_are_not_in_the_buffers(tmp_path: Path) -> None:
    """Weights of another step: the buffers' main weights do not round to them, so nothing is guessed."""
    source = tmp_path / "theirs"
    shutil.copytree(GOLDEN / "moe_dp_reshardable", source)
    folder = source / "iter_0000002"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    infos = {index.fqn: info for index, info in metadata.storage_data.items()}
    weight = infos["decoder.layers.0.self_attention.linear_proj.weight"]
    content = bytearray((folder / weight.relative_path).read_bytes())
    torch.save(torch.ones(1, 16, 16).bfloat16()[0], tmp_path / "other.pt")
    other = (tmp_path / "other.pt").read_bytes()
    begin = len(content)
    (folder / weight.relative_path).write_bytes(content + other)
    weight.offset, weight.length = begin, len(other)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"does not hold decoder.layers.0.self_attention.linear_proj.weight"):
        import_run(source, tmp_path / "ours", build_model, flags=MOE.split(), log=lambda text: None)
    said: list[str] = []
    done = import_run(source, tmp_path / "ours", build_model, flags=MOE.split(), with_optimizer=False, log=said.append)
    assert not any(name.startswith("optimizer.") for name in tensors_in(done.saved.folder))
    assert "no moments in the checkpoint: resume with --no-load-optim" in said


def test_the_folder_that_is_meant(tmp_path: Path) -> None:
    golden = GOLDEN / "gpt2style_optim"
    assert find_folder(golden, None) == find_folder(golden, 1) == (golden / "iter_0000001", 1)
    assert find_folder(golden / "iter_0000001", None) == (golden / "iter_0000001", 1)
    with pytest.raises(UserError, match="has no iter_0000007"):
        find_folder(golden, 7)
    with pytest.raises(UserError, match=r"no latest_checkpointed_iteration.txt"):
        find_folder(tmp_path, None)
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(UserError, match="it is in none of the known formats"):
        import_run(tmp_path / "iter_0000003", tmp_path / "ours", build_model, flags=GPT2.split())
    with pytest.raises(UserError, match="give the flags of the model behind --"):
        import_run(golden, tmp_path / "ours", build_model)
    for flags in ("--bogus 3", "num-layers 3", "--recipe llama3-8b"):
        with pytest.raises(UserError, match=f"after --: {flags.split()[0]}"):
            import_run(golden, tmp_path / "ours", build_model, flags=f"{flags} {GPT2}".split())
    imported("gpt2style_optim", tmp_path / "ours")
    with pytest.raises(UserError, match=r"holds checkpoints \(iter_0000001\)"):
        import_run(golden, tmp_path / "ours", build_model, flags=GPT2.split())
    with pytest.raises(UserError, match="is a checkpoint of this program already"):
        import_run(tmp_path / "ours", tmp_path / "again", build_model, flags=LLAMA.split())
