"""floor.py finds the products, attention and bytes of a step from what a micro-batch computes, on every rank."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks

from benchmarks import add_row, bench
from benchmarks.bench import main
from benchmarks.bench_floor import FloorMeasure, StepFloor, update_bytes
from benchmarks.floor import Clock, Timed, measure_floor, summary
from benchmarks.recorder import Recorder, Roofline
from megatron.diagnosis.planning.work import Product

LLAMA = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 4 --vocab-size 50 --num-workers 0 --warmup 1 --steps 2 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 48 --untie-embeddings-and-output-weights --floor 0.0001"
)
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"
EXPERTS = "--num-experts 4 --moe-grouped-gemm --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-layer-freq ([0]+[1]*2)"
ANCHOR = "elapsed time per iteration (ms): 9.0 | throughput per GPU (TFLOP/s/GPU): 9.0 | lm loss: 1.1E+01 |\n"


@pytest.mark.fast("flags2-101.0%-products2")
@pytest.mark.parametrize(
    ("flags", "share", "products"),
    [
        # 3 layers in 2 micro-batches; attention has 4 heads of queries and 2 of keys and of values, of 8 channels.
        (
            "",
            "100.0%",
            {"6 times 32 x 32 x 64 float32", "6 times 32 x 32 x 96 float32", "2 times 32 x 32 x 128 float32"},
        ),
        (FP8, "100.0%", {"2 times 32 x 32 x 64 fp8", "4 times 32 x 32 x 64 bfloat16", "2 times 32 x 48 x 32 fp8"}),
        (EXPERTS, "101.0%", {"4 times 64 x 32 x 32 float32 (experts, as one)", "4 times 32 x 32 x 4 float32"}),
        (f"{EXPERTS} {FP8}", "101.0%", {"2 times 64 x 32 x 32 fp8 (experts, as one)"}),
    ],
)
def test_the_floor_has_all_products_of_a_step(
    flags: str, share: str, products: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [tmp_path / name for name in ("ours.json", "anchor.log", "rows.json")]
    main([*LLAMA.split(), *flags.split(), "--json", str(results[0])])
    printed = capsys.readouterr().out
    assert f"it has {share} of the model FLOPs" in printed  # which leave out routers
    for each in products:
        for kind in ("forward", "input gradient", "weight gradient"):
            assert f"ms  {each}, {kind}: " in printed
    assert "ms  6 times batch 2, 16 queries, 4 heads, 8 and 8 channels, backward: " in printed
    ours = json.loads(results[0].read_text())
    assert ours["floor_milliseconds"] == pytest.approx(sum(ours["floor_parts"].values()), abs=0.01)
    assert ("casts to fp8" in printed) == bool("fp8" in flags)
    results[1].write_text(2 * ANCHOR)
    add_row.main(["TINY", *map(str, results)])
    assert json.loads(results[2].read_text())[0]["ours"]["floor_parts"] == ours["floor_parts"]


def test_documents_of_all_micro_batches_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    main([*LLAMA.replace("--micro-batch-size 2", "--micro-batch-size 1").split(), "--documents", "8"])
    printed = capsys.readouterr().out
    # 3 layers in each of 4 micro-batches, whose documents differ.
    assert printed.count("ms  3 times batch 1, 16 queries, 4 heads, 8 and 8 channels, forward: ") == 4
    assert "it has 100.0% of the model FLOPs" in printed


LATENT = (
    "--group-query-attention --num-query-groups 2",
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 "
    "--dsa-indexer-topk 5",
)


def test_attention_to_selected_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A query scores the keys before it and its own, and attends to 5 of them: of a row of 16 tokens 136 and 70 pairs.
    An indexer without a loss has no backward."""
    row = tmp_path / "ours.json"
    main([*LLAMA.replace(*LATENT).split(), "--json", str(row)])
    printed = capsys.readouterr().out
    assert "ms  6 times scores of an indexer: 272 pairs, 3 heads, 8 channels: " in printed
    for way in ("forward", "backward"):
        assert f"16 queries, 4 heads, 12 and 8 channels, {140 / 512:.1%} of the keys, {way}: " in printed
    assert "ms  6 times 32 x 12 x 24 float32, forward: " in printed
    assert "32 x 12 x 24 float32, weight gradient" not in printed
    assert "times choice of keys: " in printed and "loss of an indexer" not in printed
    parts = json.loads(row.read_text())["floor_parts"]
    assert parts.keys() == {"products", "attention", "memory-bound operations", "update of the weights"}
    main([*LLAMA.replace(*LATENT).split(), "--dsa-indexer-loss-coeff", "0.1"])
    printed = capsys.readouterr().out
    assert "ms  6 times loss of an indexer: 272 pairs: " in printed
    assert "ms  6 times 32 x 12 x 24 float32, weight gradient: " in printed
    main([*LLAMA.replace(*LATENT).split(), "--dsa-indexer-loss-coeff", "0.1", "--dsa-indexer-use-sparse-loss"])
    assert "ms  6 times loss of an indexer: 140 pairs: " in capsys.readouterr().out


def test_state_space_layers_have_a_part_of_the_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = tmp_path / "ours.json"
    pattern = (
        "--is-hybrid-model --hybrid-layer-pattern MGM --mamba-num-heads 4 --mamba-head-dim 16 --mamba-state-dim 8 "
        "--mamba-num-groups 2 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
        "--linear-value-head-dim 12 --linear-conv-kernel-dim 4"
    )
    main([*LLAMA.replace("--num-layers 3", pattern).split(), "--json", str(row)])
    printed = capsys.readouterr().out
    assert f"ms  4 times scan of mamba: {32 * 4 * 16 * 8} numbers of states: " in printed
    assert f"ms  2 times scan of gated_delta_net: {32 * 4 * 8 * 12} numbers of states: " in printed
    assert "times gates and norms: " in printed
    assert json.loads(row.read_text())["floor_parts"].keys() >= {"products", "state space"}


def test_what_is_not_timed_takes_the_longer_of_its_flops_and_its_bytes() -> None:
    recorder, clock = Recorder(), mock.Mock(device=torch.device("cpu"))
    clock.copy_rate.return_value, clock.milliseconds.return_value = 1e6, 2.0
    recorder.products[Product(100, 10, 10, torch.float32, backward=(False, False))] = 1  # 10,000 FLOPs a millisecond
    recorder.others[Roofline("state space", "bytes", 1e4, 3_000_000)] = 2
    recorder.others[Roofline("attention", "flops", 5e4, 3_000_000)] = 1
    config = mock.Mock(num_layers=1, fp8=None, fp4=None)
    found = {each.name: each for each in measure_floor(recorder, config, 4, 10**6, clock)}
    assert (found["bytes"].part, found["bytes"].count, found["bytes"].milliseconds) == ("state space", 8, 3.0)
    assert (found["flops"].part, found["flops"].count, found["flops"].milliseconds) == ("attention", 4, 5.0)


def test_clock_and_summary() -> None:
    clock, calls = Clock(torch.device("cpu"), 0.0), []
    assert clock.milliseconds(lambda: calls.append(1)) >= 0.0 and len(calls) >= 6
    timed = [Timed("products", "a", 3, 2.0, 4e9), Timed("attention", "b", 1, 1.5), Timed("products", "c", 1, 1.0)]
    assert summary(timed) == {"products": 7.0, "attention": 1.5}
    assert timed[0].describe() == "      6.00 ms  3 times a: 2.000 ms, 2 TFLOP/s"


def test_what_a_floor_does_not_count_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared = "--documents 500 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 2048 --calculate-per-token-loss"
    for flags, why in (
        ("--pipeline-model-parallel-size 2", "error: --floor does not count pipeline stages"),
        (shared, "error: --floor takes one micro-batch as all of a step"),
    ):
        with pytest.raises(SystemExit):
            main(["LLAMA1B", "--floor", *flags.split()])
        assert why in capsys.readouterr().err


SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16"
EXPERT_PARALLEL = (
    f"{EXPERTS} {SHARDED} --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather --delay-wgrad-compute"
)
TENSOR_PARALLEL = (  # with as many rows of the vocabulary as one process
    f"--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap {SHARDED} --make-vocab-size-divisible-by 64"
)
SMALL = LLAMA.replace("--micro-batch-size 2", "--micro-batch-size 1")
LAYOUTS = (SHARDED, EXPERT_PARALLEL, TENSOR_PARALLEL, f"--context-parallel-size 2 {SHARDED}")


class Noted(FloorMeasure):
    """Keeps the floors of the runs of this process."""

    floors: ClassVar[list[tuple[StepFloor, int]]] = []
    """And the bytes of an update."""

    def on_exit(self, iteration: int) -> None:
        super().on_exit(iteration)
        assert self.floor is not None
        self.floors.append((self.floor, update_bytes(self.context, self.providers)))


Result = tuple[Sequence[Mapping[str, Any]], int, str, dict[str, Any]]


def floors_of(layouts: Sequence[str]) -> list[Result]:
    """Returns for each layout the reports of all ranks, this rank's bytes of an update, and the lines and the row of
    the rank that logs."""
    if dist.is_initialized():
        os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    results = []
    for layout in layouts:
        with mock.patch.object(bench, "FloorMeasure", Noted), redirect_stdout(io.StringIO()) as printed:
            measured = bench.measure(*bench.read_options([*SMALL.split(), "--warmup", "2", *layout.split()]))
        floor, update = Noted.floors[-1]
        results.append((floor.ranks, update, printed.getvalue(), {} if measured is None else measured[0]))
    return results


@pytest.mark.slow
def test_all_ranks_together_compute_as_much_as_one_process() -> None:
    """And they send as much as a count by hand says."""
    others, last = run_on_ranks(floors_of, 2, LAYOUTS)
    alone = floors_of(["--bf16", f"{EXPERTS} --bf16"])
    dense, experts = (ranks[0]["flops"] for ranks, *_ in alone)
    assert all("communication" not in printed and "floor_communication" not in row for *_, printed, row in alone)
    for layout, (ranks, _, printed, row), (*_, silent, nothing) in zip(LAYOUTS, last, others, strict=True):
        assert len(ranks) == 2 and sum(rank["flops"] for rank in ranks) == (experts if "--num-e" in layout else dense)
        assert f"it has {'101.0%' if '--num-e' in layout else '100.0%'} of the model FLOPs" in printed
        for part, ms in row["floor_parts"].items():
            assert ms == pytest.approx(sum(rank["parts"][part] for rank in ranks) / 2, abs=0.01)
        kinds = {kind for rank in ranks for kind in rank["communication"]}
        assert set(row["floor_communication"]) == kinds and all(f"ms  {kind}: " in printed for kind in kinds)
        assert "floor:" not in silent and nothing == {}
    data, expert, tensor, context = ({"printed": printed, "ranks": ranks} for ranks, _, printed, _ in last)
    # A batch of 4 is 2 micro-batches of each data parallel rank, and 4 of tensor or context parallel ranks.
    assert "ms  6 times 16 x 32 x 64 bfloat16, forward: " in data["printed"]
    assert "ms  6 times 16 x 32 x 64 bfloat16, forward: " in expert["printed"]
    assert "ms  12 times 16 x 32 x 32 bfloat16, forward: " in tensor["printed"]  # half of the heads
    assert "ms  12 times 8 x 32 x 64 bfloat16, forward: " in context["printed"]  # half of the tokens
    assert "ms  12 times batch 1, 8 queries and 4 keys, " in context["printed"]
    assert "send of bfloat16 over cp" in context["ranks"][0]["communication"]
    # Query, keys and values; output; both halves of the MLP; norms, which fill 64 elements each: 3 times. Then
    # embedding, head and the last norm, whose shards fill 64 elements each.
    parameters = 3 * (32 * 64 + 32 * 32 + 32 * 96 + 48 * 32 + 2 * 64) + 2 * 128 * 32 + 64
    shards = parameters + 64
    for rank in data["ranks"]:
        sent = {kind: entry[1] for kind, entry in rank["communication"].items()}
        assert sent["reduce_scatter of float32 over dp"] == 4 * shards / 2
        assert sent["all_gather of bfloat16 over dp"] == 2 * shards / 2
    # Twice the gradient in float32; main weight and two moments in float32, read and written; the weight in bfloat16.
    assert alone[0][1] == (2 * 4 + 2 * 12 + 2) * parameters
    assert last[0][1] == others[0][1] == (2 * 4 + 2 * 12 + 2) * shards / 2


def test_the_floor_of_two_ranks_is_their_mean() -> None:
    def rank(products: float, calls: int, **more: float) -> dict[str, Any]:
        parts = {"products": products, **more}
        sent = {"all_to_all of bfloat16 over dp": (calls, calls * 10**6, calls * 1.0)} if calls else {}
        return {"parts": parts, "flops": 20.0, "rates": {"all_gather": 1e6, "copy engines": 2e6}, "communication": sent}

    floor = StepFloor([Timed("products", "a", 3, 2.0)], [rank(6.0, 0), rank(9.0, 3, attention=1.0)], 1, 50.0)
    assert floor.entries() == {
        "floor_milliseconds": 8.0,
        "floor_parts": {"products": 7.5, "attention": 0.5},
        "floor_communication": {"all_to_all of bfloat16 over dp": 1.5},
    }
    lines = list(floor.lines(10.0))
    assert lines[0] == "floor: 8.0 ms without communication, 80.0% of the step; it has 80.0% of the model FLOPs"
    assert lines[1] == "mean of 2 ranks (6.0 to 10.0 ms); operations are those of rank 1"
    assert lines[2:4] == ["      7.50 ms  products", "          6.00 ms  3 times a: 2.000 ms"]
    assert lines[-3].endswith("at the faster rate of: all_gather 1.0 GB/s, copy engines 2.0 GB/s")
    assert lines[-2].split("  ")[-1] == "all_to_all of bfloat16 over dp: 2 calls, 1.50 MB sent"
    assert lines[-1] == "floor with communication: 9.5 ms, 95.0% of the step"
