"""Predicted steps beside those that were measured on H200 GPUs."""

import dataclasses
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.cluster import Cluster
from megatron.diagnosis.planning.gpus import gpu_named
from megatron.diagnosis.planning.step_time import StepTime, step_time
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment

ROOT = Path(__file__).parents[3]
ROWS = json.loads((ROOT / "benchmarks/results/h200.json").read_text())
PAGE = (ROOT / "docs/decisions/step-time.md").read_text("utf-8")
REMOVED = ("--moe-local-token-overlap", "--moe-flex-transport", "--moe-dispatcher-transport")
"""Flags of rows whose way has been removed; a faster or slower way took its place."""
REFUSED = ("ATTENTION1B_EXACT",)
"""Cells of exact sums, whose time is not predicted."""
PLAIN = (
    "--tokenizer-type NullTokenizer --mock-data --lr 1e-4 --bf16 --attention-dropout 0 --hidden-dropout 0 "
    "--train-iters 1000 "
)


def newest_rows() -> list[Any]:
    newest = {}
    for row in ROWS:
        if row["cell"].startswith(REFUSED):
            continue
        kind = "delayed" if "delayed" in row["flags"] else ""
        newest[row["cell"], row["layout"], row["precision"], kind, bool(row.get("documents"))] = row
    return [pytest.param(row, id="-".join(map(str, key))) for key, row in newest.items()]


def predicted(flags: str, gpus: int, gpu: str = "h200", **more: Any) -> StepTime:
    words = (PLAIN + flags).split()
    for flag in REMOVED:
        if flag in words:
            at = words.index(flag)
            del words[at : at + (1 if at + 1 == len(words) or words[at + 1].startswith("--") else 2)]
    config = configure(words, launch_environment=LaunchEnvironment(gpus, True, ranks_of_host=min(gpus, 8)))
    return step_time(config, Cluster(gpu_named(gpu), gpus, 8, 8), **more)


def predicted_row(row: dict[str, Any]) -> StepTime:
    documents = row.get("documents")
    mean = document_of_a_token(documents, 8192) if documents else None
    return predicted(row["flags"], row["gpus"], document_tokens=mean)


def error_of_row(row: dict[str, Any]) -> str:
    """Returns the text of the row in docs/decisions/step-time.md."""
    name = row["cell"] + (f"/{row['layout']}" if row["layout"] != "1" else "")
    name += {"fp8": ", fp8 delayed" if "delayed" in row["flags"] else ", fp8", "bf16": ""}[row["precision"]]
    name += ", packed documents" if row.get("documents") else ""
    measured, found = row["ours"]["milliseconds"], predicted_row(row).seconds.value * 1e3
    return f"{name} {found / measured - 1:+.1%}"


def test_the_page_has_the_errors() -> None:
    errors = [error_of_row(param.values[0]) for param in newest_rows()]
    page = " ".join(PAGE.split())
    missing = [error for error in errors if not re.search(rf"[;.] {re.escape(error)}[;.]", page)]
    assert not missing, "docs/decisions/step-time.md lacks: " + "; ".join(missing)


@pytest.mark.parametrize("row", newest_rows())
def test_steps_that_were_measured(row: dict[str, Any]) -> None:
    step = predicted_row(row)
    allowed = 0.10 if row["gpus"] == 1 else 0.15
    assert step.seconds.value * 1e3 == pytest.approx(row["ours"]["milliseconds"], rel=allowed)
    assert 0.03 < step.seconds.error < 0.2


@pytest.mark.parametrize("cell", REFUSED)
def test_what_is_not_predicted_is_refused(cell: str) -> None:
    row = next(row for row in ROWS if row["cell"] == cell)
    with pytest.raises(UserError, match=r"the time of .* is not predicted"):
        predicted_row(row)


@pytest.mark.parametrize("low", ["--fp8-format e4m3 --fp8-recipe mxfp8", "--fp4-format e2m1"])
def test_emulated_formats_are_not_predicted(low: str) -> None:
    flags = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512"
    with pytest.raises(UserError, match=r"is not predicted: it is emulated, and refused by GPUs before Blackwell"):
        predicted(f"{flags} --vocab-size 1000 --micro-batch-size 1 {low}", 1)


def test_the_time_of_an_indexers_loss_is_not_predicted() -> None:
    row = next(row for row in ROWS if row["cell"] == "DSA")
    with pytest.raises(UserError, match=r"--dsa-indexer-loss-coeff 0.01: the time of .* is not predicted"):
        predicted(f"{row['flags']} --dsa-indexer-loss-coeff 0.01", 1)


def document_of_a_token(mean: float, row: int) -> float:
    """Returns the mean length of the part of a document that a token sees, in rows that cut documents of log-normal
    lengths (sigma 1), as benchmarks/bench.py makes them."""
    lengths = np.random.default_rng(0).lognormal(math.log(mean) - 0.5, 1.0, 20_000).astype(int)
    ends = np.union1d(np.cumsum(lengths), np.arange(0, lengths.sum(), row))
    pieces = np.diff(ends).astype(float)
    return float((pieces**2).sum() / pieces.sum())


LARGE = (
    "--vocab-size 128000 --num-layers 96 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 2048 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --train-iters 1000 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel "
)


def test_thousands_of_gpus_take_less_than_a_second() -> None:
    started = time.process_time()
    flags = f"{LARGE} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --pipeline-schedule zb-v"
    step = predicted(flags, 16_384, "h100")
    assert time.process_time() - started < 10  # seconds of a loaded machine; alone it is a fraction of one
    assert step.gpus == 16_384 and step.bubble > 0 and step.part("tensor parallel").value > 0


def test_rates_days_and_hours_follow_from_the_step() -> None:
    step = predicted(f"{LARGE} --tensor-model-parallel-size 8 --num-layers 8", 64, "h100")
    seconds = step.seconds.value
    assert step.tokens == 2048 * 4096 and step.tokens_per_second.value == pytest.approx(step.tokens / seconds)
    assert step.days is not None and step.days.value == pytest.approx(seconds * 1000 / 86400)
    assert step.gpu_hours is not None and step.gpu_hours.value == pytest.approx(64 * seconds * 1000 / 3600)
    assert step.mfu is not None and step.mfu.value == pytest.approx(step.flops / seconds / 64 / 989.4e12)
    assert sum(part.value for part in step.parts.values()) == pytest.approx(seconds)
    assert all(part.source for part in step.parts.values())
    assert step.weights == step.active_weights > 1e9


ADAPTED = f"{LARGE} --num-layers 8 --global-batch-size 8 --pretrained-checkpoint runs/base"


def test_frozen_weights_take_no_gradients() -> None:
    """Two thirds of the products, adapters beside them, and next to no update."""
    alone, adapted = (predicted(f"{ADAPTED} {flags}", 1) for flags in ("", "--lora-rank 16"))
    assert 2 / 3 < adapted.part("products").value / alone.part("products").value < 0.75
    assert adapted.part("attention") == alone.part("attention")
    assert adapted.part("optimizer").value < 0.01 * alone.part("optimizer").value
    assert 4 / 6 < adapted.flops / alone.flops < 0.75
    assert adapted.mfu is not None and adapted.mfu.value == pytest.approx(
        adapted.flops / adapted.seconds.value / 989.4e12
    )
    assert adapted.seconds.value < 0.8 * alone.seconds.value


def test_frozen_weights_are_not_reduced_but_gathered_where_they_are_sharded() -> None:
    alone, adapted = (predicted(f"{ADAPTED} --global-batch-size 64 {flags}", 64) for flags in ("", "--lora-rank 16"))
    assert adapted.part("data parallel").value < 0.02 * alone.part("data parallel").value
    sharded = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --lora-rank 16"
    gathered = predicted(f"{ADAPTED} --global-batch-size 64 {sharded}", 64).part("data parallel")
    assert gathered.value > 10 * adapted.part("data parallel").value


@pytest.mark.parametrize("flags", [ADAPTED, ADAPTED.replace("--sequence-parallel ", "")])
def test_no_weight_gradient_hides_the_sums_of_tensor_parallel_ranks(flags: str) -> None:
    alone, adapted = (predicted(f"{flags} --tensor-model-parallel-size 8 {lora}", 8) for lora in ("", "--lora-rank 16"))
    assert adapted.part("tensor parallel").value > 1.05 * alone.part("tensor parallel").value


def test_slower_links_take_longer() -> None:
    flags = f"{LARGE} --num-layers 8 --global-batch-size 64".replace("--overlap-grad-reduce", "")
    config = configure((PLAIN + flags).split(), launch_environment=LaunchEnvironment(64, True))
    fast, slow = (
        step_time(config, Cluster(gpu_named("h100"), 64, 8, 8, link)).part("data parallel").value
        for link in (50e9, 5e9)
    )
    assert slow > 5 * fast


def test_active_weights_of_experts() -> None:
    moe = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --num-layers 2 --global-batch-size 8"
    step = predicted(LARGE + moe, 8)
    assert step.weights - step.active_weights == 2 * 6 * 3 * 8192 * 1024


def test_what_has_no_figure_is_refused() -> None:
    gpu = dataclasses.replace(gpu_named("h100"), nic=None)
    config = configure((PLAIN + LARGE).split(), launch_environment=LaunchEnvironment(64, True))
    with pytest.raises(UserError, match="give --link"):
        step_time(config, Cluster(gpu, 64, 8, 8))
    words = (PLAIN + LARGE).replace("--vocab-size 128000", "").replace("NullTokenizer", "SentencePieceTokenizer")
    bare = configure(
        [*words.split(), "--tokenizer-model", __file__, "--dry-run"],
        launch_environment=LaunchEnvironment(1, True),
    )
    with pytest.raises(UserError, match="give --vocab-size"):
        step_time(bare, Cluster(gpu_named("h100"), 1, 8, 8))
