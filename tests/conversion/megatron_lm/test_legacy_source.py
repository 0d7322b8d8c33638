"""Files of legacy checkpoints: files of ranks are put together; what does not fit is named."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.megatron_runs import FLAGS, GOLDEN, MOE, same_bits, tensors_in
from safetensors.torch import load_file
from torch import Tensor

from megatron.conversion.megatron_lm.importing import ImportedRun, import_run
from megatron.conversion.megatron_lm.legacy_layout import FILE, FLAT_FILE
from megatron.core.exceptions import UserError
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model

LEGACY = GOLDEN / "moe_legacy"
FOLDER = "iter_0000002"
PLAIN = (
    "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --bf16 "
    "--tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 4 --vocab-size 39 --ffn-hidden-size 16 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
)
WIDTH = 8
NORMS_OF_MTP = ("enorm", "hnorm", "final_layernorm")


def imported(source: Path, root: Path, flags: str = MOE, **keywords: Any) -> ImportedRun:
    return import_run(source, root, build_model, flags=flags.split(), log=lambda text: None, **keywords)


def test_the_legacy_format_holds_what_the_reshardable_format_holds(tmp_path: Path) -> None:
    """One run saved in both formats: weights, main weights, moments; experts one by one, a flat optimizer buffer."""
    legacy = imported(LEGACY, tmp_path / "legacy")
    whole = imported(GOLDEN / "moe_fully_reshardable", tmp_path / "whole", FLAGS["moe_fully_reshardable"])
    assert 'moe_layer_freq: "[0,1]"\n' in (tmp_path / "legacy" / "flags.yaml").read_text()
    first, second = tensors_in(legacy.saved.folder), tensors_in(whole.saved.folder)
    assert first.keys() == second.keys() and len(first) == 4 * 18 + 1
    for key, tensor in first.items():
        assert same_bits(tensor, second[key]), key
    assert legacy.state == whole.state and legacy.state is not None and legacy.state.iteration == 2


def layer(generator: torch.Generator) -> dict[str, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    return {
        "input_layernorm.weight": draw(WIDTH),
        "self_attention.linear_proj.weight": draw(WIDTH, WIDTH),
        "self_attention.linear_qkv.weight": draw(3 * WIDTH, WIDTH),
        "pre_mlp_layernorm.weight": draw(WIDTH),
        "mlp.linear_fc1.weight": draw(2 * 16, WIDTH),
        "mlp.linear_fc2.weight": draw(WIDTH, 16),
    }


def split(name: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """The part of a tensor that Megatron-LM gives to a tensor parallel rank."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(ranks, 1)[rank]
    if name.endswith("linear_fc1.weight"):  # gate and up are split apart
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(ranks)[rank] if tensor.dim() > 1 else tensor


def model() -> dict[str, Tensor]:
    """A dense model of four layers with a tied embedding of 40 rows, by canonical names."""
    generator = torch.Generator().manual_seed(3)
    found = {"embedding.word_embeddings.weight": torch.randn(40, WIDTH, generator=generator).bfloat16()}
    for number in range(4):
        found |= {f"decoder.layers.{number}.{key}": value for key, value in layer(generator).items()}
    found["decoder.final_layernorm.weight"] = torch.randn(WIDTH, generator=generator).bfloat16()
    return found


def state_of(whole: Mapping[str, Tensor], stage: int, stages: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """The state dict of a rank: layers are counted from 0 on each stage, the last one has a copy of the embedding."""
    per_stage = 4 // stages
    found = {}
    for name, tensor in whole.items():
        part = split(name, tensor, rank, ranks).clone()
        if ".layers." in name:
            number = int(name.split(".")[2])
            if number // per_stage == stage:
                found[name.replace(f"layers.{number}.", f"layers.{number % per_stage}.")] = part
        elif name.startswith("embedding"):
            if stage == 0:
                found[name] = part
            if stage == stages - 1 and stages > 1:
                found["output_layer.weight"] = part
        elif stage == stages - 1:
            found[name] = part
    return found


def plain_optimizer(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """State as an optimizer of Megatron-LM that is not sharded has it: matrices first, then vectors."""
    groups = [[n for n, t in state.items() if (t.dim() > 1) == decays] for decays in (True, False)]
    names = [name for group in groups for name in group]
    return {
        "optimizer": {
            "state": {
                number: {"exp_avg": state[name].float() * 2, "exp_avg_sq": state[name].float() ** 2}
                for number, name in enumerate(names)
            },
            "param_groups": [
                {"params": list(range(len(groups[0]))), "wd_mult": 1.0, "step": 5},
                {"params": list(range(len(groups[0]), len(names))), "wd_mult": 0.0, "step": 5},
            ],
        },
        "grad_scaler": {},
        "fp32_from_fp16_params": [[state[name].float() for name in group] for group in groups],
    }


def write(root: Path, states: Mapping[str, dict[str, Tensor]], optimizer: bool = True) -> Path:
    for name, state in states.items():
        folder = root / "iter_0000005" / name
        folder.mkdir(parents=True)
        content: dict[str, Any] = {"model": state, "iteration": 5, "checkpoint_version": 3.0}
        if optimizer:
            content["optimizer"] = plain_optimizer(state)
        torch.save(content, folder / FILE)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return root


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2)])
def test_ranks_are_put_together(tmp_path: Path, tensor: int, pipeline: int) -> None:
    whole = model()
    states = {
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else ""): state_of(whole, p, pipeline, t, tensor)
        for t in range(tensor)
        for p in range(pipeline)
    }
    done = imported(write(tmp_path / "theirs", states), tmp_path / "ours", PLAIN)
    ours = tensors_in(done.saved.folder)
    assert len(ours) == 4 * len(whole)
    for name, value in whole.items():
        assert same_bits(ours[name], value), name
        assert same_bits(ours[f"optimizer.param.{name}"], value.float()), name
        assert same_bits(ours[f"optimizer.exp_avg.{name}"], value.float() * 2), name
        assert same_bits(ours[f"optimizer.exp_avg_sq.{name}"], value.float() ** 2), name


def test_experts_of_two_ranks(tmp_path: Path) -> None:
    """Two files that differ in the second number: expert parallel ranks, since both have the embedding."""
    content = torch.load(LEGACY / FOLDER / "mp_rank_00" / FILE, weights_only=False)
    for rank in range(2):
        state = {}
        for name, value in content["model"].items():
            if "local_experts" in name:
                number = int(name.split("local_experts.")[1].split(".")[0])
                if number // 2 != rank:
                    continue
                name = name.replace(f"local_experts.{number}", f"local_experts.{number % 2}")
            state[name] = value
        folder = tmp_path / "theirs" / FOLDER / f"mp_rank_00_{rank:03d}"
        folder.mkdir(parents=True)
        torch.save({**content, "model": state}, folder / FILE)
    done = imported(tmp_path / "theirs" / FOLDER, tmp_path / "ours", with_optimizer=False)
    one = imported(LEGACY, tmp_path / "one", with_optimizer=False)
    ours, theirs = tensors_in(done.saved.folder), tensors_in(one.saved.folder)
    assert ours.keys() == theirs.keys() and all(same_bits(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("apart", [False, True])
def test_experts_of_an_optimizer_that_is_not_sharded(tmp_path: Path, apart: bool) -> None:
    """Each expert has parameters of its own between those of others; with expert parallel ranks in an optimizer of
    their own."""
    source = tmp_path / "theirs"
    shutil.copytree(LEGACY, source)
    path = source / FOLDER / "mp_rank_00" / FILE
    (path.parent / FLAT_FILE).unlink()
    content = torch.load(path, weights_only=False)
    in_bf16 = (item for item in content["model"].items() if getattr(item[1], "dtype", None) == torch.bfloat16)
    trained = dict(in_bf16)  # all but the biases that balance experts
    experts = {name: value for name, value in trained.items() if "local_experts" in name}
    assert list(experts)[:2] == [f"decoder.layers.1.mlp.experts.local_experts.0.linear_fc{k}.weight" for k in (1, 2)]
    if apart:
        dense = {name: value for name, value in trained.items() if name not in experts}
        optimizers = [plain_optimizer(dense), plain_optimizer(experts)]
        for group in optimizers[1]["optimizer"]["param_groups"]:
            group["is_expert_parallel"] = True
        content["optimizer"] = optimizers
    else:
        content["optimizer"] = plain_optimizer(trained)
    torch.save(content, path)
    ours = tensors_in(imported(source, tmp_path / "ours").saved.folder)
    states = [name for name in ours if name.startswith("optimizer.param.")]
    assert len(states) == 18 and sum("experts.linear_fc" in name for name in states) >= 2
    for name in states:
        weight = ours[name.removeprefix("optimizer.param.")]
        assert same_bits(ours[name], weight.float()), name
        for kind, state in (("exp_avg", weight.float() * 2), ("exp_avg_sq", weight.float() ** 2)):
            assert same_bits(ours[name.replace("optimizer.param", f"optimizer.{kind}")], state), name


def changed(tmp_path: Path, change: Any) -> Path:
    shutil.copytree(LEGACY, tmp_path / "theirs")
    path = tmp_path / "theirs" / FOLDER / "mp_rank_00" / FILE
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    return tmp_path / "theirs"


NORM = "decoder.final_layernorm.weight"
FAULTS: dict[str, tuple[Any, str]] = {
    "missing": (lambda c: c["model"].pop(NORM), rf"has no {NORM}, which the flags of the model need"),
    "foreign": (lambda c: c["model"].update(own=torch.ones(1)), r"the model of these flags has no own"),
    "shape": (lambda c: c["model"].update({NORM: torch.ones(9)}), r"has shape \[16\] on this rank .*shape \[9\]"),
    "moved": (lambda c: c["model"].update({NORM: torch.full((16,), 3.0).bfloat16()}), r"does not hold decoder.final_l"),
    "hostile": (lambda c: c.update(model={"x": Evil()}), r"nothing of it was executed"),
}


class Evil:
    """Runs a command when it is unpickled in the usual way."""

    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch /tmp/was-executed",)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path: Path, fault: str) -> None:
    change, says = FAULTS[fault]
    with pytest.raises(UserError, match=says):
        imported(changed(tmp_path, change), tmp_path / "ours")
    assert not (tmp_path / "ours").exists() or not list((tmp_path / "ours").iterdir())


def test_missing_ranks_and_old_buffers_are_named(tmp_path: Path) -> None:
    states = {f"mp_rank_00_{p:03d}": state_of(model(), p, 2, 0, 1) for p in range(2)}
    source = write(tmp_path / "a", {**states, "mp_rank_01_001": states["mp_rank_00_001"]})
    with pytest.raises(UserError, match=r"3 folders mp_rank_\*, .* 2 tensor, 2 pipeline .* some are missing"):
        imported(source, tmp_path / "ours", PLAIN)
    shutil.copytree(LEGACY, tmp_path / "old")
    torch.save({0: {}}, tmp_path / "old" / FOLDER / "mp_rank_00" / FLAT_FILE)
    (unwanted,) = source.glob("*/mp_rank_01_001")
    shutil.rmtree(unwanted)
    torch.save([1], unwanted.with_name("mp_rank_00_000") / FILE)
    with pytest.raises(UserError, match=r"mp_rank_00_000/.*: contains a list, not a dict"):
        imported(source, tmp_path / "ours", PLAIN)
    with pytest.raises(UserError, match=r"distrib_optim.pt: optimizer state in the format of releases before 0.6"):
        imported(tmp_path / "old", tmp_path / "ours")
    assert imported(tmp_path / "old", tmp_path / "ours", with_optimizer=False).state is not None


def test_main_weights_at_another_place_are_found(tmp_path: Path) -> None:
    state = state_of(model(), 0, 1, 0, 1)
    source = write(tmp_path / "theirs", {"mp_rank_00": state})
    path = source / "iter_0000005/mp_rank_00" / FILE
    content = torch.load(path, weights_only=False)
    masters = content["optimizer"]["fp32_from_fp16_params"]
    masters[0][1], masters[0][7] = masters[0][7], masters[0][1]
    torch.save(content, path)
    with pytest.raises(UserError, match=r"linear_proj.weight: the main weight at its place does not round to it"):
        imported(source, tmp_path / "ours", PLAIN)


MLA = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1 --global-batch-size 4 --ffn-hidden-size 128 "
    "--multi-latent-attention --kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    "--rope-type rope --qk-layernorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0"
)


def test_latent_attention_computes_their_logits(tmp_path: Path) -> None:
    """Weights of a model of Megatron-LM with latent attention, and the logits that it computed."""
    golden = GOLDEN.parent / "moe_mla"
    weights, io = (load_file(golden / f"mla_rope.{kind}.safetensors") for kind in ("weights", "io"))
    source = write(tmp_path / "theirs", {"mp_rank_00": weights}, optimizer=False)
    imported(source, tmp_path / "ours", MLA)
    trained = load_trained_model(build_model, tmp_path / "ours", log=lambda text: None)
    with torch.no_grad():
        logits = trained.model(io["tokens"], io["position_ids"], None)
    torch.testing.assert_close(logits.float(), io["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inner", ["transformer_layer", "mtp_model_layer"])
def test_layers_of_multi_token_prediction(tmp_path: Path, inner: str) -> None:
    """Both names that releases of Megatron-LM give to the transformer layer in a prediction layer."""
    whole = model()
    generator = torch.Generator().manual_seed(7)
    prefix = "mtp.layers.0"
    mtp = {f"{prefix}.{name}.weight": torch.randn(WIDTH, generator=generator).bfloat16() for name in NORMS_OF_MTP}
    mtp[f"{prefix}.eh_proj.weight"] = torch.randn(WIDTH, 2 * WIDTH, generator=generator).bfloat16()
    mtp |= {f"{prefix}.{inner}.{name}": value for name, value in layer(generator).items()}
    source = write(tmp_path / "theirs", {"mp_rank_00": {**whole, **mtp}})
    ours = tensors_in(imported(source, tmp_path / "ours", f"{PLAIN} --mtp-num-layers 1").saved.folder)
    for name, value in {**whole, **mtp}.items():
        canonical = name.replace("mtp_model_layer", "transformer_layer")
        assert same_bits(ours[canonical], value), name
        assert same_bits(ours[f"optimizer.exp_avg.{canonical}"], value.float() * 2), name
