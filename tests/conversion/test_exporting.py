"""Exports: the files, the checkpoint that they come from, and what a failure leaves."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversion.saved_models import LLAMA, save_checkpoint
from conversion.test_against_transformers import quiet, tensors_of
from conversion.test_importing import TOKENIZER
from safetensors.torch import load_file
from support.runs import TINY, train, train_on_ranks

from megatron.conversion import exporting
from megatron.conversion.exporting import export_model
from megatron.conversion.importing import import_model
from megatron.conversion.verification import why_not_verified
from megatron.core.dist_checkpointing.checkpoint import open_checkpoint
from megatron.core.dist_checkpointing.chunk import model_chunks
from megatron.core.dist_checkpointing.safetensors_file import read_header
from megatron.core.dist_checkpointing.writing import save
from megatron.core.exceptions import UserError
from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(LLAMA, tmp_path_factory.mktemp("llama") / "run")


def weights_of(root: Path) -> dict[str, torch.Tensor]:
    model = load_trained_model(build_model, root, log=quiet).model
    return {name: weight.detach() for name, weight in model.named_parameters()}


ARCHITECTURES = {
    "LlamaForCausalLM": "--untie-embeddings-and-output-weights",
    "MistralForCausalLM": "--window-size 3,0",
    "Qwen2ForCausalLM": "--add-qkv-bias --window-size 3,0 --window-attn-skip-freq 2",
    "Qwen3ForCausalLM": "--qk-layernorm --rotary-base 1000000 --kv-channels 32",
    "MixtralForCausalLM": "--num-experts 4 --moe-router-topk 2 --untie-embeddings-and-output-weights",
    "Qwen3MoeForCausalLM": (
        "--num-experts 4 --qk-layernorm --moe-ffn-hidden-size 24 --moe-layer-freq 2 --moe-router-pre-softmax "
        "--moe-router-norm-topk-prob"
    ),
}


@pytest.mark.fast("LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_architecture_is_found_and_verified_and_everything_comes_back(architecture: str, tmp_path: Path) -> None:
    """Exported, transformers computes the same; imported again, all bits are the same."""
    root = save_checkpoint(f"{LLAMA} {ARCHITECTURES[architecture]}", tmp_path / "run")
    done = export_model(root, tmp_path / "theirs", build_model, verify=True, log=quiet)
    assert done.architecture == architecture
    assert done.comparison is not None and done.comparison.difference < 1e-5
    import_model(tmp_path / "theirs", tmp_path / "again", build_model, log=quiet)
    before, after = weights_of(root), weights_of(tmp_path / "again")
    assert before.keys() == after.keys() and len(before) > 10
    for name in before:
        assert torch.equal(before[name], after[name]), name


def test_a_router_of_one_expert_is_exported_as_it_was_imported(tmp_path: Path) -> None:
    """Both forms of Qwen3-MoE with one expert a token, without naming the architecture."""
    for flags in ("", "--moe-router-norm-topk-prob"):
        one = "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --qk-layernorm"
        root = save_checkpoint(f"{LLAMA} {one} {flags}", tmp_path / f"run{flags}")
        export_model(root, tmp_path / f"a{flags}", build_model, log=quiet, verify=True)
        import_model(tmp_path / f"a{flags}", tmp_path / f"again{flags}", build_model, log=quiet)
        done = export_model(tmp_path / f"again{flags}", tmp_path / f"b{flags}", build_model, log=quiet)
        assert done.architecture == "Qwen3MoeForCausalLM"
        a, b = (json.loads((tmp_path / f"{name}{flags}" / "config.json").read_text()) for name in ("a", "b"))
        assert a == b and a["norm_topk_prob"] == bool(flags)


@pytest.mark.parametrize(
    "split",
    [
        pytest.param("--expert-tensor-parallel-size 2", id="channels", marks=pytest.mark.slow),
        pytest.param("--expert-model-parallel-size 2 --expert-tensor-parallel-size 1", id="experts"),
    ],
)
def test_any_layout_may_have_written_the_checkpoint(split: str, tmp_path: Path) -> None:
    """Ranks that share one group of keys and values, and the experts or each expert's channels."""
    flags = f"{LLAMA} --num-experts 4 --group-query-attention --num-query-groups 1 --moe-grouped-gemm --train-iters 1"
    layout = f"--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer {split}"
    train_on_ranks(f"--mock-data --eval-iters 0 --save {tmp_path / 'run'} {flags} {layout}", 2)
    export_model(tmp_path / "run", tmp_path / "theirs", build_model, shard_bytes=20_000, log=quiet)
    import_model(tmp_path / "theirs", tmp_path / "again", build_model, log=quiet)
    before, after = weights_of(tmp_path / "run"), weights_of(tmp_path / "again")
    for weight in before:
        if "experts" not in weight:  # in memory, they are one by one or together
            assert torch.equal(before[weight], after[weight]), weight
    fc2 = tensors_of(tmp_path / "theirs")["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    assert torch.equal(fc2, before["decoder.layers.1.mlp.experts.linear_fc2.weight"][3])


def test_an_export_is_verified_by_default_where_that_is_possible(llama: Path, tmp_path: Path) -> None:
    """The reason is logged where it is not: too large a model for this machine, or a class that is not there."""
    assert export_model(llama, tmp_path / "a", build_model, verify=None, log=quiet).comparison is not None
    assert why_not_verified("LlamaForCausalLM", 10**12).startswith("in float32 the model takes 4000.0 GB, over half")
    assert why_not_verified("LlamaForCausalLM", 10**6) is None
    assert "has no LlamaForCausalML" in why_not_verified("LlamaForCausalML", 10**6)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "why_not_verified", lambda *_: "no memory")
        assert export_model(llama, tmp_path / "b", build_model, verify=None, log=said.append).comparison is None
    assert "the export is not verified: no memory" in said


def test_a_refused_model_leaves_nothing(tmp_path: Path) -> None:
    root = save_checkpoint(f"{LLAMA} --num-experts 4 --moe-expert-capacity-factor 1.0", tmp_path / "run")
    with pytest.raises(UserError, match=r"a limit of tokens per expert \(--moe-expert-capacity-factor\)"):
        export_model(root, tmp_path / "theirs", build_model, log=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_weights_and_their_type(tmp_path: Path) -> None:
    """Weights of a bfloat16 run; in float32, its optimizer's main weights. Both are verified as they are written."""
    train(f"--mock-data --eval-iters 0 --train-iters 1 --save {tmp_path} {LLAMA} --bf16 --lr 1e-5", base=TINY)
    export_model(tmp_path, tmp_path / "half", build_model, verify=True, log=quiet)
    export_model(tmp_path, tmp_path / "full", build_model, dtype=torch.float32, verify=True, log=quiet)
    half, full = tensors_of(tmp_path / "half"), tensors_of(tmp_path / "full")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name in half:
        assert half[name].dtype == torch.bfloat16 and torch.equal(full[name].bfloat16(), half[name])
    assert not torch.equal(full["model.embed_tokens.weight"], half["model.embed_tokens.weight"].float())


def change_weight(root: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    """Write the checkpoint under `root` again with another value of one tensor."""
    model = load_trained_model(build_model, root, log=quiet).model
    chunks = list(model_chunks(model, lambda info: ()))
    change(next(chunk.flat for chunk in chunks if chunk.name == name))
    config = open_checkpoint(root / "iter_0000001").manifest.config
    shutil.rmtree(root)
    save(root, chunks, step=1, common={}, config=config, layout={})


def test_weights_that_are_not_finite_are_refused(llama: Path, tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    root = shutil.copytree(llama, tmp_path / "run")
    change_weight(root, name, lambda weight: weight[7].fill_(1e6))
    said = f"iter_0000001: {name} has values that are NaN or infinite"
    with pytest.raises(UserError, match=rf"{said} as float16 \(it is stored as float32\)$"):
        export_model(root, tmp_path / "theirs", build_model, dtype=torch.float16, log=quiet)
    export_model(root, tmp_path / "full", build_model, log=quiet)
    change_weight(root, name, lambda weight: weight[7].fill_(float("nan")))
    with pytest.raises(UserError, match=f"{said}$"):
        export_model(root, tmp_path / "theirs", build_model, log=quiet)
    assert not (tmp_path / "theirs").exists()


def test_an_export_whose_logits_differ_is_not_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: config.json with another base of the rotary frequencies."""
    real = exporting.json.dumps
    wrong = {"rope_theta": 500.0}
    monkeypatch.setattr(
        exporting.json, "dumps", lambda keys, **rest: real(keys | (wrong if "rope_theta" in keys else {}), **rest)
    )
    with pytest.raises(UserError, match="theirs is not written: transformers computes other logits than this model"):
        export_model(llama, tmp_path / "theirs", build_model, verify=True, log=quiet)
    assert not list(tmp_path.iterdir())


def test_shards_and_their_index(llama: Path, tmp_path: Path) -> None:
    export_model(llama, tmp_path / "one", build_model, log=quiet)
    done = export_model(llama, tmp_path / "many", build_model, shard_bytes=30_000, log=quiet)
    assert (tmp_path / "one" / "model.safetensors").is_file()
    assert not list((tmp_path / "one").glob("*.index.json"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(done.files) and len(done.files) > 2
    assert index["metadata"]["total_size"] == done.nbytes
    sizes = {}
    for file in done.files:
        tensors = load_file(tmp_path / "many" / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        sizes[file] = (sum(tensor.nbytes for tensor in tensors.values()), len(tensors))
    assert all(size <= 30_000 or count == 1 for size, count in sizes.values())


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    """Its files, and the id that ends a text, without which transformers would not stop."""
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {TOKENIZER} --vocab-size 640"
    tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(TOKENIZER))
    root = save_checkpoint(f"{LLAMA} {flags}", tmp_path / "run", vocab_size=640)
    export_model(root, tmp_path / "theirs", build_model, log=quiet)
    assert (tmp_path / "theirs" / "tokenizer.json").read_bytes() == (TOKENIZER / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["eos_token_id"] == build_tokenizer(tokenizer).eod and config["vocab_size"] == 640


def test_the_target_must_be_free_and_a_failure_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="theirs is not empty; name a folder that is empty or does not exist"):
        export_model(llama, tmp_path / "theirs", build_model, log=quiet)
    with pytest.raises(UserError, match=r"--load .*nothing: no such folder"):
        export_model(tmp_path / "nothing", tmp_path / "b", build_model, log=quiet)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_data_file", full)
    with pytest.raises(UserError, match="No space left on device; nothing is exported"):
        export_model(llama, tmp_path / "b", build_model, log=quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_a_broken_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    root = shutil.copytree(llama, tmp_path / "run")
    file = root / "iter_0000001" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[read_header(file)["decoder.layers.1.mlp.linear_fc2.weight"].offset] ^= 1
    file.write_bytes(content)
    said = r"rank_00000.safetensors: the bytes of decoder.layers.1.mlp.linear_fc2.weight .* do not match their checksum"
    with pytest.raises(UserError, match=said):
        export_model(root, tmp_path / "theirs", build_model, log=quiet)
    assert not (tmp_path / "theirs").exists()
