"""What the dry run says about dynamic context parallelism: idle ranks and times, from documents of the run's data."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.chat_templates import CHATML, write_folder
from support.command_lines import configured
from support.runs import GPT

from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data.tokenizer.build import build_tokenizer
from megatron.diagnosis.dry_run.dry_run import dry_run
from megatron.diagnosis.dry_run.report import report_lines
from megatron.diagnosis.planning.regrouping import PackedDocuments, RegroupingGain, packed_documents
from megatron.diagnosis.planning.time_report import time_lines
from megatron.training.config.settings import LaunchEnvironment

DYNAMIC = "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 1024"
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 4096 --max-position-embeddings 4096 "
    "--lr 1e-3 --micro-batch-size 1 --global-batch-size 32 --train-iters 9 --calculate-per-token-loss --bf16 --dry-run "
    f"--attention-dropout 0 --hidden-dropout 0 {DYNAMIC}"
)
WORDS = f"{FLAGS} --context-parallel-size 4 --reset-attention-mask --tokenizer-type NullTokenizer --vocab-size 50"


def write(prefix: Path, lengths: list[int]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    for length in lengths:
        builder.add_item(np.zeros(length, np.int32))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def gain_of(flags: str, prefix: str, ranks: int = 8) -> RegroupingGain:
    config = configured(f"{flags} --data-path {prefix}", base="", ranks=ranks)
    found = packed_documents(config, ([prefix], None), build_tokenizer(config.tokenizer))
    assert isinstance(found, RegroupingGain)
    return found


def without_gain(flags: str, prefix: str, ranks: int = 8) -> PackedDocuments:
    """Those of the run without dynamic context parallelism."""
    words = flags.replace(DYNAMIC, "")
    config = configured(f"{words} --data-path {prefix}", base="", ranks=ranks)
    return packed_documents(config, ([prefix], None), build_tokenizer(config.tokenizer))


def test_uneven_documents_gain_and_equal_ones_do_not(tmp_path: Path) -> None:
    """Documents of a whole row, or of half a row, give every rank equally much work."""
    equal = gain_of(WORDS, write(tmp_path / "equal", [4096] * 9))
    assert equal.document_tokens == 4096 and equal.documents == 256
    assert equal.gain == pytest.approx(1, abs=0.01) and equal.idle(equal.in_rows) < 0.01
    halves = gain_of(WORDS, write(tmp_path / "halves", [2048] * 9))
    assert halves.document_tokens == 2048 and halves.gain == pytest.approx(1, abs=0.01)
    lengths = np.random.default_rng(1).lognormal(5.5, 1.5, 400).astype(int).clip(16, 4096).tolist()
    uneven = gain_of(WORDS, write(tmp_path / "uneven", lengths))
    assert uneven.gain > 1.2 and uneven.idle(uneven.in_rows) > 0.2 > 0.05 > uneven.idle(uneven.regrouped)


def test_conversations_leave_their_padding(tmp_path: Path) -> None:
    tokenizer = write_folder(tmp_path / "tokenizer", CHATML)
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * 2200}]
    path = tmp_path / "talks.jsonl"
    path.write_text((json.dumps({"messages": turns}) + "\n") * 3)
    flags = f"{FLAGS} --sft --tokenizer-type SFTTokenizer --tokenizer-model {tokenizer}"
    found = gain_of(flags, str(path))
    assert found.documents == 8 * 32 and found.document_tokens < 2300, "one fits into a row"
    assert found.gain > 1.5, "the rest of each row is padding"
    assert found.row_work > 1.5 * found.work and found.in_rows >= found.row_work


def test_the_report_says_it(tmp_path: Path) -> None:
    prefix = write(tmp_path / "text", [3000, 100, 100, 900])
    config = configured(f"{WORDS} --data-path {prefix} --gpu h200 --gpus-per-node 8", base="", ranks=8)
    run = dry_run(config, GPT)
    assert run.regrouping is not None
    line = next(line for line in report_lines(config, run) if line.startswith("regrouping"))
    assert f": {run.regrouping.gain:.2f} times as fast (simulated without communication: " in line
    launch = LaunchEnvironment(8, True)
    times = [*time_lines(config, launch, run.padded_vocab_size, run.parameters, run.regrouping)]
    assert sum("with --hybrid-context-parallel, and " in line for line in times) == 1
    unknown = [*time_lines(config, launch, run.padded_vocab_size, run.parameters)]
    assert any("--hybrid-context-parallel is not counted" in line for line in unknown)


def test_ranks_wait_for_those_with_long_documents(tmp_path: Path) -> None:
    """Four ranks that share a row have parts of different attention, unless they exchange tokens for heads; data
    parallel ranks wait at the end of the step, less with balanced rows."""
    equal = write(tmp_path / "equal", [4096] * 9)
    assert without_gain(WORDS, equal).uneven == pytest.approx(1), "zig-zag parts of one document are alike"
    uneven = write(tmp_path / "uneven", [4096, *[256] * 64])
    in_parts = without_gain(WORDS, uneven).uneven
    assert without_gain(f"{WORDS} --cp-comm-type a2a", uneven).uneven < in_parts - 0.05
    alone = WORDS.replace("--context-parallel-size 4", "")
    by_chance, balanced = (without_gain(f"{alone} {flag}", uneven).uneven for flag in ("", "--balanced-packing"))
    assert 1 <= balanced < by_chance
    assert without_gain(alone, uneven, ranks=1).uneven == pytest.approx(1)


def test_rows_of_documents_are_predicted_by_their_documents(tmp_path: Path) -> None:
    """The static command says what the dynamic one says of rows."""
    prefix = write(tmp_path / "text", [3000, 100, 100, 900])
    data = f"--data-path {prefix} --gpu h200 --gpus-per-node 8"
    static, dynamic = WORDS.replace(DYNAMIC, ""), times_of(f"{WORDS} {data}")
    lines = times_of(f"{static} {data}")
    (in_rows,) = (line.rpartition(" and ")[2] for line in dynamic if "in rows" in line)
    assert in_rows == " ".join([*lines[1].split()[1:3], "in rows"])
    assert any(line.strip().startswith("uneven documents") for line in lines)
    assert not any("whole rows" in line for line in lines)
    mock = times_of(f"{static} --mock-data --gpu h200 --gpus-per-node 8")
    assert "attention is counted over whole rows, since the data is synthetic (--mock-data): " in "\n".join(mock)
    assert not any("whole rows" in line for line in times_of(static.replace("--reset-attention-mask", data)))


def times_of(flags: str) -> list[str]:
    config = configured(flags, base="", ranks=8)
    run = dry_run(config, GPT)
    return [*time_lines(config, LaunchEnvironment(8, True), run.padded_vocab_size, run.parameters, run.documents)]
