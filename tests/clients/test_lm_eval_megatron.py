"""lm-evaluation-harness's own backend `megatron_lm` scores our checkpoints, and finds what our model computes."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks
from support.runs import train

from megatron.training.trained_model import load_trained_model
from tools.entry_scripts import build_model

ROOT = Path(__file__).parents[2]
BPE = ROOT / "tests/data/golden/corpus/gpt2bpe"
DENSE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr 1e-2 --mock-data --num-workers 0 --eval-iters 0 "
    f"--bf16 --init-method-std 0.3 --vocab-file {BPE}/vocab.json --merge-file {BPE}/merges.txt"
)
MOE = f"{DENSE} --num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1] --moe-token-dispatcher-type alltoall"
PAIRS = [("The capital of France is", " Paris"), ("Two and two are", " four"), ("The sky is", " blue and far away")]
TEXT = "One two three four, five six. " * 4
PROMPT = "Fish live in"


class OnCpu:
    """The backend names CUDA devices only; this stands for its module `torch`, with the CPU in their place."""

    cuda = SimpleNamespace(current_device=lambda: 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(name: str) -> torch.device:
        return torch.device("cpu")


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def by_harness(folder: str, batch_size: int, **parallel: int) -> dict[str, Any]:
    """What the backend answers on each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_PATH", str(ROOT))
        for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
            patch.setenv(name, "1")
        from lm_eval.models import megatron_lm

        patch.setattr(megatron_lm, "torch", OnCpu())
        model = megatron_lm.MegatronLMEval(
            load=folder,
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=f"{BPE}/vocab.json",
            merge_file=f"{BPE}/merges.txt",
            seq_length=64,
            micro_batch_size=batch_size,
            **parallel,
        )
        return {
            "pairs": model.loglikelihood(requests("loglikelihood", PAIRS)),
            "rolling": model.loglikelihood_rolling(requests("loglikelihood_rolling", [(TEXT,)])),
            "written": model.generate_until(
                requests("generate_until", [(PROMPT, {"until": ["\n\n"], "max_gen_toks": 4})])
            ),
        }


def by_model(folder: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """What our model says about each text alone, by default in the number format of the backend."""
    loaded = load_trained_model(build_model, folder)
    model = loaded.model.to(dtype)
    encode = loaded.tokenizer.tokenize

    def log_probabilities(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
        return logits[0].float().log_softmax(-1)

    pairs = []
    for context, continuation in PAIRS:
        ids, start = encode(context + continuation), len(encode(context))
        rows = log_probabilities(ids)[start - 1 : -1]
        wanted = torch.tensor(ids[start:])
        pairs.append((rows.gather(1, wanted[:, None]).sum().item(), bool((rows.argmax(-1) == wanted).all())))
    ids = encode(TEXT)
    assert len(ids) < 63  # one window
    rows = log_probabilities([loaded.tokenizer.eod, *ids])[:-1]
    ids_of_prompt = encode(PROMPT)
    written: list[int] = []
    for _ in range(4):
        written.append(int(log_probabilities(ids_of_prompt + written)[-1].argmax()))
        if written[-1] == loaded.tokenizer.eod:
            break
    return {
        "pairs": pairs,
        "rolling": [rows.gather(1, torch.tensor(ids)[:, None]).sum().item()],
        "written": [loaded.tokenizer.detokenize(written)],
    }


def rounding(wanted: dict[str, Any], folder: str) -> float:
    """Largest relative error that bf16 makes with one text alone; another order of summation makes another one."""
    exact = [sum_ for sum_, _ in by_model(folder, torch.float32)["pairs"]]
    return max(abs(sum_ / right - 1) for (sum_, _), right in zip(wanted["pairs"], exact, strict=True))


def check(found: dict[str, Any], wanted: dict[str, Any], rel: float) -> None:
    """Sums of log probabilities agree."""
    assert [sum_ for sum_, _ in found["pairs"]] == pytest.approx([sum_ for sum_, _ in wanted["pairs"]], rel=rel)
    assert [greedy for _, greedy in found["pairs"]] == [greedy for _, greedy in wanted["pairs"]]
    assert found["rolling"] == pytest.approx(wanted["rolling"], rel=rel)
    assert found["written"] == wanted["written"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for name, flags in (("dense", DENSE), ("moe", MOE)):
        made[name] = str(tmp_path_factory.mktemp(name))
        train(f"{flags} --save {made[name]}", base="")
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch_size", "ranks", "parallel"),
    [
        ("dense", 1, 1, {}),
        ("dense", 3, 1, {}),  # padded on the left
        ("dense", 1, 2, {"devices": 2}),
        ("dense", 1, 2, {"devices": 2, "tensor_model_parallel_size": 2}),
        ("moe", 1, 1, {}),
        ("moe", 1, 2, {"devices": 2, "expert_model_parallel_size": 2}),
    ],
    ids=["one", "padded", "dp2", "tp2", "moe", "ep2"],
)
def test_the_backend_finds_what_our_model_computes(
    folders: dict[str, str], model: str, batch_size: int, ranks: int, parallel: dict[str, int]
) -> None:
    alone = ranks == 1 and batch_size == 1
    wanted = by_model(folders[model])
    for found in run_on_ranks(on_rank, ranks, folders[model], batch_size, parallel):
        check(found, wanted, rel=1e-6 if alone else 4 * rounding(wanted, folders[model]))


def on_rank(folder: str, batch_size: int, parallel: dict[str, int]) -> dict[str, Any]:
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    return by_harness(folder, batch_size, **parallel)
