"""Layers with names and orders of rows of their own: Mamba-2, gated delta nets, latent and sparse attention,
multi-token prediction, hybrid models, layers of different sizes. The golden weights and logits are those of Megatron-LM
0.19.2."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conversion.megatron_lm.test_legacy_source import write as write_legacy
from conversion.megatron_lm.test_torch_dist import read_by_torch
from conversion.megatron_runs import GOLDEN, same_bits, tensors_in
from safetensors.torch import load_file
from torch import Tensor

from megatron.conversion.megatron_lm.exporting import export_run
from megatron.conversion.megatron_lm.importing import import_run
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model

LAYERS = GOLDEN.parent / "megatron_lm_layers"
_SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 48 --seq-length 16 "
    "--max-position-embeddings 16 --tokenizer-type NullTokenizer --vocab-size 39 --micro-batch-size 1 "
    "--global-batch-size 4 --swiglu --disable-bias-linear --normalization RMSNorm --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 8"
)
_DELTA = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 4 --linear-value-head-dim 8 "
    "--linear-conv-kernel-dim 4"
)
_LATENT = (
    "--position-embedding-type rope --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --rope-type rope"
)
FLAGS = {
    "gdn": "--position-embedding-type rope --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    + _DELTA,
    "dsa": f"{_LATENT} --experimental-attention-variant dsa --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 8 "
    "--dsa-indexer-topk 4",
    "mla_mtp": f"{_LATENT} --mtp-num-layers 2",
    "hybrid": "--position-embedding-type none --hybrid-layer-pattern M*-EGM/*- --mamba-state-dim 4 --mamba-head-dim 8 "
    "--mamba-num-groups 2 --mamba-num-heads 8 --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax "
    f"--moe-ffn-hidden-size 16 --mtp-num-layers 1 {_DELTA}",
    "described": "--num-layers 4 --position-embedding-type rope --heterogeneous-layers-config-encoded-json "
    '{"block_configs":['
    '{"attention":{"num_query_groups":2},"ffn":{"ffn_hidden_size":40}},'
    '{"attention":{"replace_with_linear":true},"ffn":{"no_op":true}},'
    '{"attention":{"no_op":true},"ffn":{"replace_with_linear":true}},'
    '{"attention":{"n_heads_in_group":2},"ffn":{"ffn_mult":10.5}}]}',
}


def flags_of(name: str) -> list[str]:
    words = f"{_SIZES} {FLAGS[name]}".split()
    return words[2:] if name in ("hybrid", "described") else words


_PARTS = ("z", "x", "B", "C", "dt"), ("query", "key", "value", "z", "beta", "alpha")
"""The parts of rows in the order of a module, of Mamba-2 and of gated delta nets. Safetensors files sort names."""


def golden(name: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Tensors of their checkpoint, tokens, and their logits."""
    found = load_file(LAYERS / f"{name}.safetensors")
    tokens, logits = found.pop("io.tokens"), found.pop("io.logits")

    def place(key: str) -> int:
        end, parts = key.rpartition(".")[2], _PARTS[".mixer." not in key]
        return parts.index(end) if end in parts else -1

    return {key: found[key] for key in sorted(found, key=place)}, tokens, logits


def write_folder(root: Path, tensors: dict[str, Tensor]) -> None:
    """A checkpoint of theirs with moments, written by torch."""
    folder = root / "iter_0000001"
    folder.mkdir(parents=True)
    states = {f"optimizer.state.{kind}.{name}": at * value for kind, at in MOMENTS for name, value in tensors.items()}
    dcp.save({**tensors, **states}, storage_writer=dcp.FileSystemWriter(str(folder)), no_dist=True)
    torch.save({"iteration": 1, "checkpoint_version": 3.0, "args": None}, folder / "common.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("1")


MOMENTS = (("exp_avg", 2.0), ("exp_avg_sq", 3.0))


@pytest.mark.parametrize("name", list(FLAGS))
def test_their_logits_and_their_names(name: str, tmp_path: Path) -> None:
    """An import computes their logits. Its export has their names, shapes and values, moments too."""
    tensors, tokens, logits = golden(name)
    write_folder(tmp_path / "theirs", tensors)
    done = import_run(tmp_path / "theirs", tmp_path / "ours", build_model, flags=flags_of(name), log=lambda text: None)
    trained = load_trained_model(build_model, tmp_path / "ours", log=lambda text: None)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        torch.testing.assert_close(trained.model(tokens, positions, None), logits, rtol=1e-4, atol=1e-5)
    ours = tensors_in(done.saved.folder)
    for key in [key for key in ours if key.startswith("optimizer.exp_avg.")]:
        assert same_bits(ours[key], 2 * ours[key.removeprefix("optimizer.exp_avg.")]), key
    exported = export_run(tmp_path / "ours", tmp_path / "back", log=lambda text: None)
    made = read_by_torch(exported.folder)
    states = {f"optimizer.state.{kind}.{key}": at * value for kind, at in MOMENTS for key, value in tensors.items()}
    masters = {f"optimizer.state.param.{key}": value for key, value in tensors.items()}
    expected = tensors | states | masters
    assert made.keys() == expected.keys()
    for key, value in expected.items():
        assert made[key].shape == value.shape and same_bits(made[key], value), key


_PART = re.compile(r"(.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.\w+")
_BY_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "A_log", "dt_bias")


def state_of_rank(tensors: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """The state dict of a tensor parallel rank of the model with gated delta nets: parts of rows in one tensor."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = _PART.fullmatch(name)
        if part is not None:
            rows = tensor.chunk(ranks)[rank]
            found[part[1]] = torch.cat([found[part[1]], rows]) if part[1] in found else rows.clone()
        elif name.endswith("linear_fc1.weight"):  # gate and up are split apart
            found[name] = torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
        elif name.endswith(("linear_proj.weight", "out_proj.weight", "linear_fc2.weight")):
            found[name] = tensor.chunk(ranks, 1)[rank].clone()
        else:
            found[name] = tensor.chunk(ranks)[rank].clone() if name.endswith(_BY_ROWS) else tensor
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_mixers_in_the_legacy_format(ranks: int, tmp_path: Path) -> None:
    """Weights and moments are those of the torch_dist folder. A module holds the rows of its rank part by part."""
    tensors = {name: tensor.bfloat16() for name, tensor in golden("gdn")[0].items()}
    write_folder(tmp_path / "theirs", tensors)
    states = {f"mp_rank_{rank:02d}": state_of_rank(tensors, rank, ranks) for rank in range(ranks)}
    legacy = write_legacy(tmp_path / "legacy", states)
    flags = [*flags_of("gdn"), "--bf16"]
    found = [
        tensors_in(import_run(root, tmp_path / name, build_model, flags=flags, log=lambda text: None).saved.folder)
        for name, root in (("one", tmp_path / "theirs"), ("two", legacy))
    ]
    for name, tensor in found[0].items():
        if name.startswith(("decoder", "optimizer.exp_avg.decoder")):
            assert torch.equal(found[1][name].float(), tensor.float()), name
