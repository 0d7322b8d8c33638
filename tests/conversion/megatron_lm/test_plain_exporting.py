"""Exports in the formats torch_dcp and fsdp_dtensor beside checkpoints of Megatron-LM 0.19.2, entry by entry."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from conversion.megatron_lm.test_mixer_rows import FLAGS, LAYERS, flags_of, golden, write_folder
from conversion.megatron_runs import GOLDEN, same_bits, tensors_in
from conversion.saved_models import LLAMA, save_checkpoint
from support.runs import train

from megatron.conversion.megatron_lm.exporting import ExportFormat, export_run
from megatron.conversion.megatron_lm.importing import import_run
from megatron.conversion.megatron_lm.plain_exporting import place_in_module
from megatron.conversion.megatron_lm.torch_dist import DistFolder
from megatron.core.parameters import Box
from pretrain_gpt import build_model

Kind = Literal["torch_dcp", "fsdp_dtensor"]
PLAIN = GOLDEN.parent / "plain"
VOCABULARY = 39
ORDERS: dict[str, dict[str, list[int]]] = json.loads((LAYERS / "orders.json").read_text())
"""Names and shapes of the parameters of Megatron-LM's modules, in their order."""


def quiet(text: str) -> None:
    pass


def entries(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Tensors and objects of a folder, without random states."""
    found = DistFolder(folder)
    read = {
        name: tensor.read(Box.whole(tensor.shape)).view(tensor.shape)
        for name, tensor in found.tensors.items()
        if not name.startswith("rng_state")
    }
    names = [name for name in found.objects if not name.startswith(("rng_state", "args"))]
    return read, {name: found.object(name) for name in names}


@pytest.mark.parametrize("kind", ["torch_dcp", "fsdp_dtensor"])
def test_entries_are_those_of_megatron_lm(kind: Kind, tmp_path: Path) -> None:
    """A run in bfloat16 goes in and out. Main weights, moments and numbers of parameters are theirs, but for rows that
    pad the vocabulary."""
    said: list[str] = []
    done = import_run(PLAIN / kind, tmp_path / "ours", build_model, log=said.append)
    assert done.state is not None and (done.state.iteration, done.state.consumed_train_samples) == (2, 8)
    assert '"update_count": 2' in (done.saved.folder / "manifest.json").read_text()
    ours = tensors_in(done.saved.folder)
    for name in [name for name in ours if name.startswith("optimizer.param.")]:
        weight = ours[name.removeprefix("optimizer.param.")]
        assert weight.dtype == torch.bfloat16 and same_bits(weight, ours[name].to(torch.bfloat16)), name
    assert len([name for name in ours if name.startswith("optimizer.exp_avg.")]) == 15
    exported = export_run(tmp_path / "ours", tmp_path / "back", is_local=True, ckpt_format=kind, log=said.append)
    assert exported.with_optimizer and "left behind, all" not in " ".join(said)
    (theirs, their_objects), (made, objects) = entries(PLAIN / kind / "iter_0000002"), entries(exported.folder)
    assert made.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert made[name].shape == tensor.shape, name
        rows = VOCABULARY if tensor.dim() and tensor.shape[0] == 40 else len(tensor) if tensor.dim() else None
        assert same_bits(made[name][:rows], tensor[:rows]) if rows else torch.equal(made[name], tensor), name
    assert objects.keys() >= their_objects.keys()
    for name in [name for name in their_objects if name.endswith((".params", ".wd_mult", ".betas", "num_steps"))]:
        assert objects[name] == their_objects[name], name


@pytest.mark.parametrize("case", list(ORDERS))
def test_order_of_their_modules(case: str) -> None:
    names = list(ORDERS[case])
    backwards = names[::-1]  # so that equal places are seen
    assert sorted(backwards, key=lambda name: place_in_module(name) or ()) == names
    assert None not in map(place_in_module, names) and place_in_module("decoder.layers.0.other.weight") is None


@pytest.mark.fast("mla_mtp-local", "hybrid-te")
@pytest.mark.parametrize("is_local", [False, True], ids=["te", "local"])
@pytest.mark.parametrize("name", list(FLAGS))
def test_numbered_state_of_every_kind_of_layer(name: str, is_local: bool, tmp_path: Path) -> None:
    """Mamba-2, gated delta nets, latent and sparse attention, experts, multi-token prediction, layers of different
    sizes: state has the number of the parameter in their module, and comes back."""
    write_folder(tmp_path / "theirs", golden(name)[0])
    flags = [*flags_of(name), *(["--moe-grouped-gemm"] if name == "hybrid" else [])]
    first = import_run(tmp_path / "theirs", tmp_path / "ours", build_model, flags=flags, log=quiet)
    done = export_run(tmp_path / "ours", tmp_path / "out", is_local=is_local, ckpt_format="torch_dcp", log=quiet)
    assert done.with_optimizer
    tensors, objects = entries(done.folder)
    order = ORDERS.get(f"{name}_local" if is_local else name)
    if order is not None:  # their local layers have not all kinds
        assert {key: [*tensors[key].shape] for key in tensors if key.startswith("model.")} == {
            f"model.{key}": shape for key, shape in order.items()
        }
        matrices = [key for key, shape in order.items() if len(shape) > 1]
        for number, key in enumerate([*matrices, *(key for key in order if key not in matrices)]):
            weight = tensors[f"model.{key}"]
            assert same_bits(tensors[f"optimizer.state.{number}.exp_avg"], 2 * weight), key
            assert same_bits(tensors[f"optimizer.state.{number}.exp_avg_sq"], 3 * weight), key
        assert objects["optimizer.param_groups.0.params"] == [*range(len(matrices))]
        assert objects["optimizer.param_groups.1.params"] == [*range(len(matrices), len(order))]
    again = import_run(tmp_path / "out", tmp_path / "back", build_model, flags=flags, log=quiet)
    one, two = tensors_in(first.saved.folder), tensors_in(again.saved.folder)
    assert one.keys() == two.keys() and all(same_bits(one[key], two[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FLAGS))
def test_named_state_of_every_kind_of_layer_comes_back(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "theirs", golden(name)[0])
    flags = flags_of(name)
    first = import_run(tmp_path / "theirs", tmp_path / "ours", build_model, flags=flags, log=quiet)
    export_run(tmp_path / "ours", tmp_path / "out", ckpt_format="fsdp_dtensor", log=quiet)
    again = import_run(tmp_path / "out", tmp_path / "back", build_model, flags=flags, log=quiet)
    one, two = tensors_in(first.saved.folder), tensors_in(again.saved.folder)
    assert one.keys() == two.keys() and all(same_bits(one[key], two[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize(("grouped", "is_local"), [("", True), ("--moe-grouped-gemm", False)])
def test_numbered_state_of_experts_and_biases_comes_back(grouped: str, is_local: bool, tmp_path: Path) -> None:
    moe = f"--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-layer-freq [0,1] {grouped}"
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    run = f"{sizes} --mock-data --train-iters 2 --bf16 --qk-layernorm {moe} --add-qkv-bias --lr 1e-2"
    train(f"{run} --save {tmp_path / 'ours'}")
    found = []
    kinds: tuple[ExportFormat, ...] = ("torch_dist", "torch_dcp")
    for kind in kinds:
        out, back = tmp_path / f"{kind}-out", tmp_path / f"{kind}-back"
        done = export_run(tmp_path / "ours", out, is_local=is_local, ckpt_format=kind, log=quiet)
        assert done.with_optimizer
        found.append(tensors_in(import_run(out, back, build_model, log=quiet).saved.folder))
    one, two = found
    assert one.keys() == two.keys() and all(same_bits(one[key], two[key]) for key in one)


def test_weights_alone(tmp_path: Path) -> None:
    """A checkpoint without a run: weights of fsdp_dtensor have 32 bits, and no state comes with them."""
    save_checkpoint(LLAMA, tmp_path / "ours")
    kinds: tuple[ExportFormat, ...] = ("torch_dcp", "fsdp_dtensor")
    for kind in kinds:
        done = export_run(tmp_path / "ours", tmp_path / kind, ckpt_format=kind, log=quiet)
        tensors = entries(done.folder)[0]
        assert not done.with_optimizer and not [name for name in tensors if not name.startswith("model.")]
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
