"""Command lines of training runs on GPUs. They stand here so that a test on a CPU can check that they are valid.

`python gpu_runs.py [--plant] FLAGS` trains once while torch raises an error whenever the host waits for the device.
`--plant` adds such a wait to each step, to show that it is noticed.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt
from megatron.facades.pretrain import pretrain_config
from megatron.training import loop
from megatron.training.arguments import configure
from megatron.training.hooks.hook import Hook
from megatron.training.providers import Providers
from megatron.training.setup import set_up

ITERATIONS = 50
FLAGS = f"""
--num-layers 4 --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 2 --swiglu
--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length 256
--max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 --global-batch-size 16
--train-iters {ITERATIONS} --lr 4e-4 --lr-warmup-iters 20 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--eval-iters 0 --split 100,0,0 --log-interval 10
""".split()
"""Flags of all runs. The tests add data and tokenizer."""

DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--train-iters", "10", "--lr-decay-iters", "50"]

OFFLOADED = [
    *["--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "1", "--offload-modules"],
    *["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"],
]
WATCHED = {
    "float32": [],
    "bf16": ["--bf16"],
    "fp16": ["--fp16"],
    "bf16 dropout": ["--bf16", "--hidden-dropout", "0.1"],
    "bf16 offload": ["--bf16", "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5", *OFFLOADED],
}
WATCHED_LENGTH = ["--train-iters", "20", "--lr-warmup-iters", "10"]

GRAPH_STEPS = 5
GRAPHS = ["--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "2"]
"""Two steps run eagerly, the others as graphs."""
_GRAPH_LENGTH = ["--train-iters", f"{GRAPH_STEPS}", "--lr-warmup-iters", "2", "--bf16", "--log-interval", "1"]
_SMALL_GPT = f"""
--num-layers 3 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256
--micro-batch-size 1 --global-batch-size 6 --lr 4e-4 --lr-decay-style cosine --lr-decay-iters {ITERATIONS}
--clip-grad 1.0 --weight-decay 0.1 --eval-iters 0
""".split()
_NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]
_LLAMA = [word for word in FLAGS if word not in ("--split", "100,0,0")]
_EXPERTS = [
    *["--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "256", "--moe-grouped-gemm"],
    *["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"],
    *["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"],
]
GRAPH_RUNS = {
    "gpt": [*_SMALL_GPT, *_GRAPH_LENGTH, *_NO_DROPOUT],
    "gpt dropout": [*_SMALL_GPT, *_GRAPH_LENGTH, "--attention-dropout", "0.1", "--hidden-dropout", "0.1"],
    "gpt recompute": [
        *[*_SMALL_GPT, *_GRAPH_LENGTH, *_NO_DROPOUT, "--recompute-granularity", "full"],
        *["--recompute-method", "uniform", "--recompute-num-layers", "1", "--calculate-per-token-loss"],
    ],
    "llama": [*_LLAMA, *_GRAPH_LENGTH],
    "llama fp8 delayed": [*_LLAMA, *_GRAPH_LENGTH, "--fp8-format", "hybrid", "--fp8-recipe", "delayed"],
    "llama fp8 tensorwise": [*_LLAMA, *_GRAPH_LENGTH, "--fp8-format", "e4m3", "--fp8-recipe", "tensorwise"],
    "experts": [*_LLAMA, *_GRAPH_LENGTH, *_EXPERTS],
    "experts fp8": [*_LLAMA, *_GRAPH_LENGTH, *_EXPERTS, "--fp8-format", "e4m3", "--fp8-recipe", "tensorwise"],
    "llama fp16": [
        *_LLAMA,
        *[word for word in _GRAPH_LENGTH if word != "--bf16"],
        *["--fp16", "--initial-loss-scale", "65536"],
    ],
}
"""Runs that are trained without graphs and with graphs of micro-batches."""

DETERMINISTIC = "--deterministic-mode"
_WAYS = {"": [], "graphs of ": GRAPHS}
RUNS = {
    "float32": FLAGS,
    "bf16": [*FLAGS, "--bf16"],
    "dropout": [*FLAGS, *DROPOUT],
    **{f"watched {name}": [*FLAGS, *WATCHED_LENGTH, *flags] for name, flags in WATCHED.items()},
    **{f"{way}{name}": [*flags, *graphs] for name, flags in GRAPH_RUNS.items() for way, graphs in _WAYS.items()},
    **{
        f"deterministic {way}{name}": [*flags, DETERMINISTIC, *graphs]
        for name, flags in GRAPH_RUNS.items()
        for way, graphs in _WAYS.items()
    },
}
"""Every command line of pretrain_gpt.py that the tests of tests/gpu start."""


class NoWaiting(Hook):
    """From the fifth step on, makes torch raise an error when the host waits for the device."""

    def on_start(self, iteration: int) -> None:
        self.after_step(iteration)

    def after_step(self, iteration: int) -> None:
        if iteration == 4 and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")

    def on_exit(self, iteration: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def train_watched(flags: Sequence[str], plant: bool = False) -> int:
    """Trains with `NoWaiting` and returns the number of steps. With `plant` each step waits for the device."""
    build_hooks, step, steps = set_up.build_hooks, loop.train_step, 0

    def counted(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        result = step(*arguments)
        if plant:
            result.update.grad_norm.item()
        return result

    set_up.build_hooks = lambda *given: [*build_hooks(*given), NoWaiting()]
    loop.train_step = counted
    try:
        providers = Providers(pretrain_gpt.build_model, pretrain_gpt.build_datasets, pretrain_gpt.build_forward_step)
        pretrain_config(configure(list(flags)), providers, time.monotonic())
    finally:
        set_up.build_hooks, loop.train_step = build_hooks, step
    return steps


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--plant"]
    print(f"took {train_watched(words, '--plant' in sys.argv)} steps")
