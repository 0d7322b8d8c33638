"""bench.py measures any run; its cells are valid command lines; add_row.py compares it with an anchor's log."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.launch import launch

from benchmarks import add_row
from benchmarks.bench import RandomDocuments, main, read_options
from benchmarks.bench_cells import CELLS
from benchmarks.bench_trace import kind_of, timeline_lines, timeline_of
from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data.tokenizer.build import build_tokenizer
from megatron.training.arguments import configure

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 4 --vocab-size 50 --num-workers 0 --warmup 1 --steps 3"
)
LOG = """
 iteration  5/ 15 | elapsed time per iteration (ms): 900.0 | throughput per GPU (TFLOP/s/GPU): 9.0 | lm loss: 1.1E+01 |
 iteration  8/ 15 | elapsed time per iteration (ms): 90.0 | throughput per GPU (TFLOP/s/GPU): 90.0 | lm loss: 1.1E+01 |
 iteration 10/ 15 | elapsed time per iteration (ms): 50.0 | throughput per GPU (TFLOP/s/GPU): 162.0 | lm loss: 1.0E+01 |
 iteration 15/ 15 | elapsed time per iteration (ms): 52.0 | throughput per GPU (TFLOP/s/GPU): 160.0 | lm loss: 9.5E+00 |
[Rank 0] max allocated: 1000.00 | max reserved: 1200.00
"""


@pytest.mark.parametrize("cell", CELLS)
def test_cells_are_valid_command_lines(cell: str) -> None:
    options, flags = read_options([cell, "--steps", "30", "--micro-batch-size", "1", "--zipf", "0"])
    config = configure(flags)
    assert (options.cell, options.steps, options.zipf) == (cell, 30, 0.0)
    assert config.training.train_iters == 35 and config.training.micro_batch_size == 1
    assert config.transformer.params_dtype is torch.bfloat16 and config.transformer.hidden_dropout == 0.0


def test_both_sides_have_the_same_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["LLAMA1B", "--flags"])
    assert "--vocab-size 128256" in capsys.readouterr().out
    config = configure(read_options(["LLAMA1B"])[1])
    assert config.tokenizer.model_vocab_size(build_tokenizer(config.tokenizer).vocab_size) == 128256


def test_an_unknown_cell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["GPT5"])
    assert "GPT5 is no cell: GPT125M, LLAMA1B" in capsys.readouterr().err


@pytest.mark.parametrize(("exponent", "first", "last"), [(0.0, 0.25, 0.25), (1.0, 0.43, 0.14), (2.0, 0.62, 0.06)])
def test_frequencies_of_tokens(exponent: float, first: float, last: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        vocab_size, eod = 4, 9

    monkeypatch.setattr(RandomDocuments, "exponent", exponent)
    documents = RandomDocuments(Tokenizer())
    tokens = torch.cat([torch.from_numpy(documents[number]) for number in range(40)])
    assert len(documents[3]) == documents.sequence_lengths[3] and (tokens == 9).sum() == 40
    shares = torch.bincount(tokens[tokens != 9], minlength=4) / (tokens != 9).sum()
    assert len(shares) == 4 and shares[0] == pytest.approx(first, abs=0.02)
    assert shares[3] == pytest.approx(last, abs=0.02)


def test_a_run_is_measured_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, results = tmp_path / "ours.json", tmp_path / "rows.json"
    main([*TINY.split(), "--json", str(ours)])
    assert "3 steps), " in capsys.readouterr().out
    row = json.loads(ours.read_text())
    assert row["fastest"] <= row["milliseconds"] <= row["slowest"] and row["steps"] == 3
    assert row["tokens_per_second"] == pytest.approx(64 / row["milliseconds"] * 1000, rel=0.01)
    assert 3.5 < row["loss"] < 4.5 and row["tflops"] >= 0.0 and row["mfu"] is None
    (tmp_path / "anchor.log").write_text(LOG)
    for _ in range(2):
        add_row.main(["TINY/tp2", str(ours), str(tmp_path / "anchor.log"), str(results)])
    rows = json.loads(results.read_text())
    assert len(rows) == 2 and rows[0]["cell"] == "TINY" and rows[0]["layout"] == "tp2"
    # The first interval does not count, and of the other three only the last two.
    assert rows[0]["anchor"]["milliseconds"] == 51.0 and rows[0]["anchor"]["peak_memory_gb"] == 1.05
    assert rows[0]["ratio"] == pytest.approx(51.0 / row["milliseconds"], abs=1e-3)


def test_real_tokens_take_the_place_of_random_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every document is the same token over and over, so a few steps learn it. Random tokens cannot be learnt."""
    prefix, ours = str(tmp_path / "text"), tmp_path / "ours.json"
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for _ in range(40):
            builder.add_document(torch.full((30,), 7), [30])
        builder.finalize(f"{prefix}.idx")
    main(
        [*TINY.split(), "--data-path", prefix, "--split", "100,0,0", "--lr", "0.1", "--steps", "8", "--json", str(ours)]
    )
    row = json.loads(ours.read_text())
    assert row["loss"] < 0.5 and row["zipf"] is None and " ? MHz, loss " in capsys.readouterr().out
    for flag in ("--zipf", "--documents"):
        with pytest.raises(SystemExit):
            read_options(["LLAMA1B", "--data-path", prefix, flag, "1"])
        assert "--data-path names real ones" in capsys.readouterr().err


@pytest.mark.slow
def test_a_layout_of_two_ranks_is_measured_as_torchrun_starts_it(tmp_path: Path) -> None:
    ours = tmp_path / "ours.json"
    flags = f"--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --kernels --json {ours}"
    program = launch(flags, 2, tmp_path / "out", main, base=TINY)
    assert program.exit_codes() == [0, 0], program.output(0) + program.output(1)
    row = json.loads(ours.read_text())
    ranks, kinds = row["timeline"]["ranks"], {kind["name"] for kind in row["timeline"]["communications"]}
    assert row["gpus"] == len(ranks) == 2 and "all_gather" in kinds
    for step, computing, exposed, copies, idle, communicating in ranks:
        assert step == pytest.approx(computing + exposed + copies + idle, abs=0.1)
        assert 0 < computing < step and exposed <= communicating
    shown = program.output(0) + program.output(1)
    assert "communication, exposed" in shown and "each rank in ms" in shown


@pytest.mark.slow
def test_dynamic_context_parallelism_is_measured(tmp_path: Path) -> None:
    """Documents of random tokens are taken out of their rows; the loss is that of the rows."""
    shared, losses = "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 8", []
    for number, more in enumerate(("", shared)):
        ours = tmp_path / f"{number}.json"
        flags = f"--documents 6 --context-parallel-size 2 --calculate-per-token-loss --bf16 {more} --json {ours}"
        program = launch(flags, 2, tmp_path / f"out{number}", main, base=TINY)
        assert program.exit_codes() == [0, 0], program.output(0) + program.output(1)
        losses.append(json.loads(ours.read_text())["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_the_timeline_is_that_of_the_rank_with_most_exposed_communication(capsys: pytest.CaptureFixture[str]) -> None:
    def rank(number: int, exposed: float) -> dict[str, Any]:
        kind = {"name": "all_gather", "ranks": "", "calls": 3, "busy": 30.004, "exposed": exposed, "megabytes": 0.0}
        parts = {"step": 100.0, "computing": 60.0, "exposed_communication": exposed, "exposed_copies": 0.0}
        parts |= {"idle": 40.0 - exposed, "communicating": 30.0}
        return {"device": "GPU", "rank": number, "steps": 0, "communications": [kind], "kernels": [], **parts}

    timeline = timeline_of([rank(0, 10.0), rank(1, 25.0), rank(2, 15.0)])
    assert timeline["rank"] == 1 and timeline["communications"][0]["exposed"] == 25.0
    assert timeline["ranks"][2] == [100.0, 60.0, 15.0, 0.0, 25.0, 30.0]
    print(*timeline_lines(timeline), sep="\n")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "GPU of rank 1, one step" and lines[-2].split() == ["1", "60.00", "25.00", "15.00"]


def test_each_of_our_kernels_has_a_kind() -> None:
    folder = Path(__file__).parents[2] / "megatron"
    kernel = re.compile(r"^@(?:triton|gluon)\.jit.*\ndef (\w+_kernel)\(", re.MULTILINE)
    names = {name for file in folder.rglob("*_triton.py") for name in kernel.findall(file.read_text())}
    assert len(names) > 40
    assert not [name for name in names if kind_of(name) == "other"]
    kinds = {"_backward_specialized_kernel": "attention", "_activation_backward_kernel": "activations"}
    assert {name: kind_of(name) for name in kinds} == kinds
    assert kind_of("nccl_all_gather") == "communication" and kind_of("memset") == "other"
    assert kind_of("Memcpy PtoP (Device -> Device)") == "communication"
    assert kind_of("void at::native::multi_tensor_apply_kernel<LpNormFunctor>") == "update and gradient norm"
    assert kind_of("_apply_kernel") == "dropout, biases, residuals"


def test_a_row_without_an_anchor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = {"tokens_per_second": 10.0, "milliseconds": 5.0, "tflops": 1.0, "gpus": 8, "flags": "", "timeline": {}}
    ours |= dict.fromkeys(("fastest", "slowest", "steps", "mfu", "peak_memory_gb", "loss", "zipf", "device"))
    ours |= dict.fromkeys(("sm_clock_mhz", "torch", "date", "commit"))
    (tmp_path / "ours.json").write_text(json.dumps(ours))
    words = ["TINY/hsdp", *(str(tmp_path / name) for name in ("ours.json", "none.log", "rows.json"))]
    with pytest.raises(SystemExit, match="no line of speed after its first"):
        add_row.main(words)
    add_row.main([*words, "--keep-ours"])
    assert "TINY/hsdp: ours 1.0 TFLOP/s (5.0 ms): no ratio: the anchor's log has" in capsys.readouterr().out
    assert json.loads((tmp_path / "rows.json").read_text())[0]["anchor"] is None


def test_an_anchor_that_did_not_end_gives_no_row() -> None:
    with pytest.raises(SystemExit, match="stopped after iteration 10 of 15: give it more time by LIMIT"):
        add_row.read_anchor(LOG.split(" iteration 15/")[0])


def test_an_interval_in_which_the_anchor_compiled_does_not_count() -> None:
    line = (
        "iteration {}/ 10 | elapsed time per iteration (ms): {} | throughput per GPU (TFLOP/s/GPU): {} | lm loss: 1.0"
    )
    intervals = [(1, 28288.1, 25.0), (5, 6826.0, 103.8), (10, 1455.3, 486.7)]
    assert add_row.read_anchor("\n".join(line.format(*each) for each in intervals))["milliseconds"] == 1455.3
