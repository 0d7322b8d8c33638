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
from megatron.diagnosis.planning.regrouping import RegroupingGain, regrouping_gain
from megatron.diagnosis.planning.time_report import time_lines
from megatron.training.config.settings import LaunchEnvironment

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 4096 --max-position-embeddings 4096 "
    "--lr 1e-3 --micro-batch-size 1 --global-batch-size 32 --train-iters 9 --calculate-per-token-loss --bf16 --dry-run "
    "--attention-dropout 0 --hidden-dropout 0 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 1024"
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
    return regrouping_gain(config, ([prefix], None), build_tokenizer(config.tokenizer))


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
