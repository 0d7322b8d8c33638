"""tools/floor.py finds the products, attention and bytes of a step from what a micro-batch computes."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import add_row
from tools.bench import main
from tools.floor import Clock, Timed, summary

LLAMA = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 4 --vocab-size 50 --num-workers 0 --warmup 1 --steps 2 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 48 --untie-embeddings-and-output-weights --floor 0.0001"
)
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"
EXPERTS = "--num-experts 4 --moe-grouped-gemm --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-layer-freq ([0]+[1]*2)"
ANCHOR = "elapsed time per iteration (ms): 9.0 | throughput per GPU (TFLOP/s/GPU): 9.0 | lm loss: 1.1E+01 |\n"


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


def test_clock_and_summary() -> None:
    clock, calls = Clock(torch.device("cpu"), 0.0), []
    assert clock.milliseconds(lambda: calls.append(1)) >= 0.0 and len(calls) >= 6
    timed = [Timed("products", "a", 3, 2.0, 4e9), Timed("attention", "b", 1, 1.5), Timed("products", "c", 1, 1.0)]
    assert summary(timed) == {"products": 7.0, "attention": 1.5}
    assert timed[0].describe() == "      6.00 ms  3 times a: 2.000 ms, 2 TFLOP/s"


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["GPT125M", "--floor"])
    assert "--floor counts no communication" in capsys.readouterr().err
