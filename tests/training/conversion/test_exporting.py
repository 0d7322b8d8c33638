"""Exports: of what a run saved, as the architecture that says it, or not at all."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import TINY, train, train_on_ranks
from training.conversion.test_against_transformers import quiet, tensors_of
from training.conversion.test_importing import TOKENIZER

from megatron.core.dist_checkpointing.safetensors_file import read_header
from megatron.core.exceptions import UserError
from megatron.training.config.tokenizer import TokenizerConfig
from megatron.training.conversion.exporting import export_model
from megatron.training.conversion.importing import import_model
from megatron.training.tokenizer.build import build_tokenizer
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model

LLAMA = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
"""Beside the sizes: what makes a GPT a Llama."""


def run(flags: str, folder: Path) -> Path:
    """A run of an iteration, saved."""
    train(f"--mock-data --eval-iters 0 --train-iters 1 --save {folder} {flags}", base=TINY)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return run(LLAMA, tmp_path_factory.mktemp("llama") / "run")


def weights_of(root: Path) -> dict[str, torch.Tensor]:
    model = load_trained_model(build_model, root, say=quiet).model
    return {name: weight.detach() for name, weight in model.named_parameters()}


ARCHITECTURES = {
    "LlamaForCausalLM": "--untie-embeddings-and-output-weights",
    "MistralForCausalLM": "--window-size 3,0",
    "Qwen2ForCausalLM": "--add-qkv-bias --window-size 3,0 --window-attn-skip-freq 2",
    "Qwen3ForCausalLM": "--qk-layernorm --rotary-base 1000000 --kv-channels 32",
    "MixtralForCausalLM": "--num-experts 4 --moe-router-topk 2 --untie-embeddings-and-output-weights",
    "Qwen3MoeForCausalLM": "--num-experts 4 --qk-layernorm --moe-ffn-hidden-size 24 --moe-layer-freq 2",
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_architecture_is_found_and_everything_comes_back(architecture, tmp_path):
    """What a run saved, exported and imported: the same flags and the same bits."""
    root = run(f"{LLAMA} {ARCHITECTURES[architecture]}", tmp_path / "run")
    done = export_model(root, tmp_path / "theirs", build_model, say=quiet)
    assert done.architecture == architecture
    import_model(tmp_path / "theirs", tmp_path / "again", build_model, say=quiet)
    before, after = weights_of(root), weights_of(tmp_path / "again")
    assert before.keys() == after.keys() and len(before) > 10
    for name in before:
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize(
    "split",
    [
        pytest.param("--expert-tensor-parallel-size 2", id="channels", marks=pytest.mark.slow),
        pytest.param("--expert-model-parallel-size 2 --expert-tensor-parallel-size 1", id="experts"),
    ],
)
def test_whatever_layout_wrote_it(split, tmp_path):
    """Ranks that share one group of keys and values, and the experts or each expert's channels."""
    flags = f"{LLAMA} --num-experts 4 --group-query-attention --num-query-groups 1 --moe-grouped-gemm --train-iters 1"
    layout = f"--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer {split}"
    train_on_ranks(f"--mock-data --eval-iters 0 --save {tmp_path / 'run'} {flags} {layout}", 2)
    export_model(tmp_path / "run", tmp_path / "theirs", build_model, shard_bytes=20_000, say=quiet)
    import_model(tmp_path / "theirs", tmp_path / "again", build_model, say=quiet)
    before, after = weights_of(tmp_path / "run"), weights_of(tmp_path / "again")
    for weight in before:
        if "experts" not in weight:  # which lie one by one or together
            assert torch.equal(before[weight], after[weight]), weight
    fc2 = tensors_of(tmp_path / "theirs")["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    assert torch.equal(fc2, before["decoder.layers.1.mlp.experts.linear_fc2.weight"][3])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--normalization LayerNorm", "LlamaForCausalLM comes nearest.*--normalization is RMSNorm for Llama"),
        ("--softmax-type off-by-one", "--softmax-type is vanilla for LlamaForCausalLM and off-by-one in the check"),
        ("--rotary-percent 0.5", "--rotary-percent is 1.0 for LlamaForCausalLM and 0.5 in the checkpoint"),
        ("--window-size 3,1", "--window-size is not set for .* and 3 1 in the checkpoint"),
        ("--embedding-multiplier 2.0", "--embedding-multiplier is not set for .* and 2.0 in the checkpoint"),
        (
            "--num-experts 4 --qk-layernorm --moe-layer-freq 2 --window-size 3,0",
            "Qwen3MoeForCausalLM comes nearest.*--window-size is not set for .* and 3 0 in the checkpoint",
        ),
    ],
)
def test_a_model_that_no_architecture_says_is_refused_by_its_flags(flags, said, tmp_path):
    root = run(f"{LLAMA} {flags}", tmp_path / "run")
    with pytest.raises(UserError, match=said):
        export_model(root, tmp_path / "theirs", build_model, say=quiet)
    assert not (tmp_path / "theirs").exists()


def test_what_no_architecture_has_is_one_sentence(tmp_path):
    """Latent attention turns twenty flags; which they are is no help."""
    latent = "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
    root = run(f"{LLAMA} {latent} --mtp-num-layers 1", tmp_path / "run")
    with pytest.raises(UserError) as refusal:
        export_model(root, tmp_path / "theirs", build_model, say=quiet)
    said = str(refusal.value)
    assert said.startswith(
        "none of the architectures that can be exported has latent attention (--multi-latent-attention) or layers that "
        "predict further tokens (--mtp-num-layers): LlamaForCausalLM, "
    )
    assert "comes nearest" not in said and "--kv-lora-rank" not in said


def test_a_named_architecture_says_it_or_is_refused(llama, tmp_path):
    assert export_model(llama, tmp_path / "a", build_model, architecture="MistralForCausalLM", say=quiet).files
    assert json.loads((tmp_path / "a" / "config.json").read_text())["sliding_window"] is None
    with pytest.raises(UserError, match="--qk-layernorm is True for Qwen3ForCausalLM and False in the checkpoint"):
        export_model(llama, tmp_path / "b", build_model, architecture="Qwen3ForCausalLM", say=quiet)
    with pytest.raises(UserError, match="GPT9: not known; LlamaForCausalLM, "):
        export_model(llama, tmp_path / "b", build_model, architecture="GPT9", say=quiet)


def test_the_weights_and_their_type(tmp_path):
    """Those of a bfloat16 run; in float32, its optimizer's main weights."""
    root = run(f"{LLAMA} --bf16 --lr 1e-5", tmp_path / "run")
    export_model(root, tmp_path / "half", build_model, say=quiet)
    export_model(root, tmp_path / "full", build_model, dtype=torch.float32, say=quiet)
    half, full = tensors_of(tmp_path / "half"), tensors_of(tmp_path / "full")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name in half:
        assert half[name].dtype == torch.bfloat16 and torch.equal(full[name].bfloat16(), half[name])
    assert not torch.equal(full["model.embed_tokens.weight"], half["model.embed_tokens.weight"].float())


def test_shards_and_their_index(llama, tmp_path):
    export_model(llama, tmp_path / "one", build_model, say=quiet)
    done = export_model(llama, tmp_path / "many", build_model, shard_bytes=30_000, say=quiet)
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


def test_the_tokenizer_goes_along(tmp_path):
    """Its files, and the id that ends a text, without which transformers would write on."""
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {TOKENIZER} --vocab-size 640"
    tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(TOKENIZER))
    root = run(f"{LLAMA} {flags}", tmp_path / "run")
    export_model(root, tmp_path / "theirs", build_model, say=quiet)
    assert (tmp_path / "theirs" / "tokenizer.json").read_bytes() == (TOKENIZER / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["eos_token_id"] == build_tokenizer(tokenizer).eod and config["vocab_size"] == 640


def test_the_target_must_be_free_and_a_failure_leaves_nothing(llama, tmp_path, monkeypatch):
    from megatron.training.conversion import exporting

    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds something already"):
        export_model(llama, tmp_path / "theirs", build_model, say=quiet)
    with pytest.raises(UserError, match="nothing holds no checkpoint"):
        export_model(tmp_path / "nothing", tmp_path / "b", build_model, say=quiet)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_data_file", full)
    with pytest.raises(UserError, match="No space left on device; nothing is exported"):
        export_model(llama, tmp_path / "b", build_model, say=quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_a_broken_tensor_is_named(llama, tmp_path):
    root = shutil.copytree(llama, tmp_path / "run")
    file = root / "iter_0000001" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[read_header(file)["decoder.layers.1.mlp.linear_fc2.weight"].offset] ^= 1
    file.write_bytes(content)
    said = r"rank_00000.safetensors: the bytes of decoder.layers.1.mlp.linear_fc2.weight .* do not give their checksum"
    with pytest.raises(UserError, match=said):
        export_model(root, tmp_path / "theirs", build_model, say=quiet)
    assert not (tmp_path / "theirs").exists()
