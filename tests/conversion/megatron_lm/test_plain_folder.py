"""The formats torch_dcp and fsdp_dtensor: state dicts of modules, written by torch.distributed.checkpoint."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conversion.megatron_lm.test_mixer_rows import flags_of, golden, state_of_rank, write_folder
from conversion.megatron_runs import same_bits, tensors_in
from torch import Tensor

from megatron.conversion.megatron_lm.importing import ImportedRun, import_run
from megatron.core.exceptions import UserError
from pretrain_gpt import build_model

EXPERTS = "mlp.experts.experts.linear"


def unstacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors layer by layer."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_stacked = name.startswith("decoder.layers.") and not name.split(".")[2].isdigit()
        numbered = [name.replace("layers.", f"layers.{layer}.", 1) for layer in range(len(tensor))]
        found |= dict(zip(numbered, tensor, strict=True)) if is_stacked else {name: tensor}
    return found


def module_state(name: str, halves: bool) -> dict[str, Tensor]:
    """The state dict of the module whose torch_dist checkpoint the golden one is: parts of rows in one tensor, experts
    one by one, Mamba-2's convolution as parameters of the mixer; with `halves` gate and up of an MLP apart."""
    found: dict[str, Tensor] = {}
    for key, value in state_of_rank(unstacked(golden(name)[0]), 0, 1).items():
        names = [key.replace("mixer.conv1d.", "mixer.conv1d_")]
        if EXPERTS in key:
            names = [key.replace("experts.experts", f"experts.local_experts.{number}") for number in range(len(value))]
        for own, part in zip(names, value if EXPERTS in key else [value], strict=True):
            if halves and "linear_fc1.weight" in own:
                found[f"{own}_w"], found[f"{own}_v"] = (half.clone() for half in part.chunk(2))
            else:
                found[own] = part.clone()
    return found


def write_plain(root: Path, state: dict[str, Tensor], optimizer: Any = None) -> Path:
    folder = root / "iter_0000001"
    folder.mkdir(parents=True)
    whole = {"args": argparse.Namespace(), "iteration": 1, "checkpoint_version": 3.0, "model": state}
    whole["opt_param_scheduler"] = {"max_lr": 1e-3, "num_steps": 4}
    whole |= {"optimizer": optimizer} if optimizer else {}
    dcp.save(whole, storage_writer=dcp.FileSystemWriter(str(folder)), no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    return root


def imported(root: Path, name: str, target: Path, **keywords: Any) -> ImportedRun:
    return import_run(root, target, build_model, flags=flags_of(name), log=lambda text: None, **keywords)


@pytest.mark.parametrize("name", ["hybrid", "mla_mtp"])
def test_fsdp_dtensor_holds_what_torch_dist_holds(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "dist", golden(name)[0])
    state = module_state(name, halves=True)
    moments = {f"module.module.{key}": {"exp_avg": 2 * part, "exp_avg_sq": 3 * part} for key, part in state.items()}
    steps = {"param_to_group_meta": {key: {"step": 7} for key in moments}}
    write_plain(tmp_path / "plain", state, {"state": moments, **steps})
    first = tensors_in(imported(tmp_path / "dist", name, tmp_path / "one").saved.folder)
    done = imported(tmp_path / "plain", name, tmp_path / "two")
    second = tensors_in(done.saved.folder)
    assert first.keys() == second.keys() and all(same_bits(first[key], second[key]) for key in first)
    assert '"num_steps": 4' in (done.saved.folder / "manifest.json").read_text()
    assert '"update_count": 7' in (done.saved.folder / "manifest.json").read_text()


def test_torch_dcp_holds_the_weights(tmp_path: Path) -> None:
    write_folder(tmp_path / "dist", golden("gdn")[0])
    state = module_state("gdn", halves=False)
    root = write_plain(tmp_path / "plain", state, {"state": {"0": {"exp_avg": torch.ones(3)}}})
    with pytest.raises(UserError, match=r"state of parameter 0, which is in no .* import with --no-load-optim"):
        imported(root, "gdn", tmp_path / "two")
    first, second = (
        tensors_in(imported(each, "gdn", target, with_optimizer=False).saved.folder)
        for each, target in ((tmp_path / "dist", tmp_path / "one"), (root, tmp_path / "two"))
    )
    assert first.keys() == second.keys() and all(same_bits(first[key], second[key]) for key in first)


def test_what_is_missing_and_what_is_unknown(tmp_path: Path) -> None:
    state = module_state("gdn", halves=False)
    taken = state.pop("decoder.final_layernorm.weight")
    with pytest.raises(UserError, match=r"has no decoder.final_layernorm.weight, which the flags of the model need"):
        imported(write_plain(tmp_path / "less", state), "gdn", tmp_path / "x")
    state |= {"decoder.final_layernorm.weight": taken, "decoder.other.weight": taken}
    with pytest.raises(UserError, match=r"the model of these flags has no decoder.other.weight"):
        imported(write_plain(tmp_path / "more", state), "gdn", tmp_path / "x")
