"""tools/floor.py finds the products, attention and bytes of a step from what a micro-batch computes."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import add_row
from megatron.core.backends import LOCAL
from tools.bench import main
from tools.floor import Clock, Product, Recorder, Timed, summary

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


def test_bytes_of_memory_bound_operations() -> None:
    recorder = Recorder()
    backend = recorder.recording(LOCAL)
    x, weight = torch.ones(4, 8), torch.ones(8)

    def forward_step(data: None, model: None) -> None:
        backend.rms_norm(x, weight, 1e-5)
        backend.bias_dropout_add(x, None, x, 0.0, None)
        backend.linear(x, torch.ones(16, 8, requires_grad=True))

    backend.rms_norm(x, weight, 1e-5)  # before the micro-batch
    for _ in range(2):  # only the first counts
        recorder.around(forward_step)(None, None)  # type: ignore[arg-type]
    size = 4 * 8 * 4
    # The norm reads x and writes y; backward reads x and dy and writes dx. The sum reads two and writes one; backward
    # reads the residual's gradient where it joins the norm's.
    assert recorder.moved == {"norms": 5 * size, "residuals": 4 * size}
    assert recorder.products == {Product(4, 8, 16, torch.float32, backward=(False, True)): 1}
    assert recorder.flops() == 3 * 2 * 4 * 8 * 16


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
