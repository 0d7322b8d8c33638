"""Whole runs from the command line: `torchrun pretrain_*.py`, a checkpoint, a resume in another layout.

Other cells of this folder are built through the library. These go through the words: a run is stopped at a checkpoint
and goes on in another layout, in half of the cells with `--use-checkpoint-args`, so that what the checkpoint records
describes the model. Each is compared with one process that was given all flags and was never stopped.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.programs import commands
from support.user_scripts import ROOT

from megatron.training.log.jsonl import read_metrics

CORPUS = ROOT / "tests/data/golden/corpus"

SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
WORDS = "--tokenizer-type NullTokenizer --vocab-size 40"
LLAMA = f"{SIZES} {WORDS} --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
LATENT = (
    f"{LLAMA} --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24"
ROUTED = f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
MIXERS = "--mamba-num-heads 8 --mamba-head-dim 8 --mamba-num-groups 4 --mamba-state-dim 4"
DSA = "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 4"
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
BERT = (
    f"{SIZES} --tokenizer-type BertWordPieceLowerCase --vocab-file {CORPUS}/bert/vocab.txt "
    "--position-embedding-type rope"
)
T5 = (
    f"{SIZES} --encoder-seq-length 16 --decoder-seq-length 8 --tokenizer-type BertWordPieceCase "
    f"--vocab-file {CORPUS}/bert/vocab.txt --vocab-extra-ids 20 --position-embedding-type rope"
)

MODELS = {
    "llama": f"{LLAMA} --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "gpt2": f"{SIZES} {WORDS} --hidden-dropout 0.1 --attention-dropout 0.1 --output-layer-bias",
    "mup": f"{LLAMA} --use-mup --mup-base-hidden-size 16",
    "latent": LATENT,
    "experts": f"{LLAMA} {ROUTED}",
    "latent experts with predictions": f"{LATENT} {ROUTED} --mtp-num-layers 1",
    "sparse attention": f"{LATENT} {DSA} --dsa-indexer-loss-coeff 1e-2 --dsa-indexer-use-sparse-loss",
    "delta net": f"{LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
    "--linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8",
    "hybrid": f"{LLAMA} --hybrid-layer-pattern M-M* {MIXERS}",
    "hybrid with experts": f"{LLAMA} --hybrid-layer-pattern MEM*E {MIXERS} {ROUTED} --num-layers 5",
    "hybrid with predictions": f"{LLAMA} --hybrid-layer-pattern M-M*/*- --mtp-num-layers 1 {MIXERS}",
    "bert": BERT,
    "t5": T5,
}
"""The flags that describe a model; a run with --use-checkpoint-args is not given them."""
SCRIPTS = {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py"} | {
    name: "pretrain_mamba.py" for name in MODELS if name.startswith("hybrid")
}

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer"
LAYOUTS = {
    "alone": (1, ""),
    "dp2": (2, ""),
    "zero1": (2, f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"),
    "zero3": (2, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
    "tp2": (2, TP2),
    "sp2": (2, f"{TP2} --sequence-parallel"),
    "pp2": (2, PP2),
    "vpp": (2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "zb-v": (2, f"{PP2} --pipeline-schedule zb-v"),
    "cp2": (2, "--context-parallel-size 2"),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "tp2-pp2": (4, f"{TP2} --sequence-parallel {PP2}"),
}
BARS = {"hybrid": "M-|M*", "hybrid with experts": "MEM|*E", "hybrid with predictions": "M-|M*/*-"}
"""Patterns with the ends of pipeline stages, which are layout."""

PRECISIONS = {"fp64": ("--fp64", 1e-11), "fp32": ("", 2e-5), "bf16": ("--bf16", 2e-2)}
"""Flags, and the largest relative difference of losses and gradient norms."""


@dataclass(frozen=True)
class Cell:
    """A run to a checkpoint in one layout and from there in another. `words`: the second half has
    --use-checkpoint-args in place of the model's flags."""

    model: str
    first: str
    then: str
    precision: str = "fp64"
    words: bool = False
    more: str = ""
    """Flags of the run: data and optimizer."""
    bars: bool = False

    def __str__(self) -> str:
        parts = [self.model, self.first, self.then, self.precision, "words" if self.words else "", self.more]
        return "-".join(part.strip("-").replace(" ", "_") for part in parts if part)

    def flags(self, layout: str, described: bool) -> tuple[int, str]:
        ranks, flags = LAYOUTS[layout]
        if self.bars and PP2 in flags:
            flags += f" --hybrid-layer-pattern {BARS[self.model]}"
        return ranks, f"{MODELS[self.model] if described else '--use-checkpoint-args'} {flags}"


_CHEAP_STATE = (
    "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16"
)
CELLS = [
    Cell("llama", "tp2", "pp2", words=True),
    Cell("llama", "zb-v", "zero3", more="--optimizer sgd --sgd-momentum 0.9"),
    Cell("llama", "sp2", "cp2", more="--loss-chunk-size 4", words=True),
    Cell("llama", "zero1", "tp2", "bf16", more=_CHEAP_STATE, words=True),
    Cell("llama", "tp2-pp2", "zero1", "fp32", more="--qk-clip --qk-clip-threshold 0.01"),
    Cell("llama", "cp2", "vpp", more="--rampup-batch-size 2 2 6"),
    Cell("llama", "dp2", "sp2", "fp32", more="--optimizer-cpu-offload --use-distributed-optimizer", words=True),
    Cell("llama", "zero1", "pp2", "bf16", more="--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"),
    Cell("llama", "vpp", "alone", more="--optimizer muon"),
    Cell("llama", "alone", "tp2-pp2", "bf16", words=True),
    Cell("gpt2", "tp2", "zb-v"),
    Cell("gpt2", "pp2", "cp2", "fp32", words=True),
    Cell("gpt2", "zero3", "sp2", more="--optimizer sgd", words=True),
    Cell("gpt2", "dp2", "tp2-pp2", more=f"{DOCUMENTS} --calculate-per-token-loss"),
    Cell("mup", "tp2", "pp2", words=True),
    Cell("mup", "zero1", "cp2", "fp32"),
    Cell("mup", "vpp", "sp2", "bf16", words=True),
    Cell("latent", "sp2", "pp2", words=True),
    Cell("latent", "cp2", "zero3", "fp32", more=DOCUMENTS),
    Cell("latent", "zb-v", "tp2", "bf16", words=True),
    Cell("experts", "ep2", "pp2", words=True),
    Cell("experts", "sp2", "ep2", "fp32", more="--loss-chunk-size 8"),
    Cell("experts", "ep2", "zero1", more="--moe-token-dispatcher-type allgather"),
    Cell("experts", "pp2", "sp2", "bf16", more="--optimizer sgd", words=True),
    Cell("latent experts with predictions", "ep2", "pp2", words=True),
    Cell("latent experts with predictions", "zero3", "sp2", "fp32"),
    Cell("sparse attention", "tp2", "pp2", more=DOCUMENTS, words=True),
    Cell("sparse attention", "cp2", "zero1", more=DOCUMENTS),
    Cell("delta net", "sp2", "pp2", more=DOCUMENTS, words=True),
    Cell("delta net", "cp2", "zero3", "fp32"),
    Cell("hybrid", "tp2", "pp2", words=True, bars=True),
    Cell("hybrid", "pp2", "cp2", more=DOCUMENTS, words=True, bars=True),
    Cell("hybrid", "zero1", "sp2", "bf16"),
    Cell("hybrid with experts", "ep2", "pp2", words=True, bars=True),
    Cell("hybrid with experts", "sp2", "zero1", more=DOCUMENTS),
    Cell("hybrid with predictions", "pp2", "tp2", words=True, bars=True),
    Cell("hybrid with predictions", "zero3", "cp2"),
    Cell("bert", "tp2", "pp2", words=True),
    Cell("bert", "zero1", "sp2", "fp32"),
    Cell("t5", "pp2", "tp2", words=True),
    Cell("t5", "sp2", "zero1", "fp32"),
]
FAST = ["llama-tp2-pp2-fp64-words", "experts-ep2-pp2-fp64-words"]

RUN = (
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-iters 4 --lr-warmup-iters 1 --clip-grad 1.0 "
    "--num-workers 0 --split 80,20,0 --eval-interval 4 --eval-iters 1 --log-interval 1 --make-vocab-size-divisible-by 4"
)
STEPS, HALF = 4, 2


def run(script: str, ranks: int, flags: str) -> None:
    """Runs an entry script under torchrun and checks that it ends well."""
    launcher = [str(commands() / "torchrun"), "--standalone", "--nproc_per_node", str(ranks), str(ROOT / script)]
    done = subprocess.run([*launcher, *flags.split()], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{script} {flags}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def figures(path: Path) -> Mapping[int, tuple[float, float]]:
    """Returns loss and gradient norm of each step. The loss of the evaluation is that of step 0."""
    history = read_metrics(path)
    found = {line["iteration"]: (line["lm loss"], line["grad norm"]) for line in history.training}
    (last,) = history.validation
    return found | {0: (last["lm loss"], 0.0)}


@pytest.mark.fast(*FAST)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_run_from_the_command_line_resumes_in_another_layout(cell: Cell, corpus: str, tmp_path: Path) -> None:
    script = SCRIPTS.get(cell.model, "pretrain_gpt.py")
    precision, tolerance = PRECISIONS[cell.precision]
    data = corpus if script in ("pretrain_gpt.py", "pretrain_mamba.py") else f"{CORPUS}/pp/bert_body_document"
    common = f"{RUN} {cell.more} {precision} --data-path {data} --data-cache-path {tmp_path}/cache"
    run(script, 1, f"{MODELS[cell.model]} {common} --train-iters {STEPS} --metrics-path {tmp_path}/whole.jsonl")

    kept = f"{common} --save {tmp_path}/kept --metrics-path {tmp_path}/halves.jsonl --train-iters {STEPS}"
    ranks, flags = cell.flags(cell.first, described=True)
    run(script, ranks, f"{flags} {kept} --exit-interval {HALF}")
    ranks, flags = cell.flags(cell.then, described=not cell.words)
    run(script, ranks, f"{flags} {kept} --load {tmp_path}/kept")

    expected, found = figures(tmp_path / "whole.jsonl"), figures(tmp_path / "halves.jsonl")
    assert set(found) == set(expected) == set(range(STEPS + 1))
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=tolerance), f"step {step}"
