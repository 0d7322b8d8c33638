"""A step that ended a run, computed again in one process from what the run wrote."""

import json
from pathlib import Path

import pytest
import torch
from diagnosis.test_non_finite import overflow_in_layer_1, poisoned
from safetensors.torch import save_file
from support.runs import GPT, train
from support.special_files import SPECIAL_FILES, special_file

from megatron.core.exceptions import UserError
from megatron.diagnosis.non_finite import REPORT, read_batches, write_batches
from megatron.diagnosis.replay import command_of, read_dump, replay, report
from megatron.training.data.batch import Batch


def test_a_loss_that_only_the_runs_script_spoils(corpus: str, tmp_path: Path) -> None:
    """Another iteration than the first: the replay's losses are those of the run, to the bit; nothing is found with
    another forward step, and the poisoned one is found in the right micro-batch of the right step."""
    flags = f"--data-path {corpus} --eval-iters 0 --log-interval 1 --hidden-dropout 0.2 --bf16"
    flags += " --rampup-batch-size 2 2 4 --train-samples 16 --micro-batch-size 1 --use-distributed-optimizer"
    spoiled = poisoned("loss", iteration=3, micro_batch=1)
    train(f"{flags} --save {tmp_path}", spoiled)
    dump = read_dump(tmp_path / "nonfinite" / "iteration_0000003")
    assert [batch.sample_ids.tolist() for batch in dump.batches] == [[4], [5], [6], [7]]
    (finding,) = (each for each in dump.findings if each.microbatch is not None)
    assert (finding.name, finding.microbatch, finding.sample_ids) == ("the forward step", 1, (5,))
    words = command_of(dump)
    assert "--use-distributed-optimizer" not in words and "--save" not in words and "--bf16" in words
    result = replay(dump, GPT)
    assert result.findings == []
    lines = list(report(dump, result))
    assert lines[0].startswith("micro-batch 0 of data parallel rank 0: lm loss ")
    assert lines[4].startswith("everything is finite in one process") and lines[5].startswith("the run's first: rank 0")
    again = replay(dump, spoiled)
    assert again.findings[0].microbatch == 1 and again.losses[0] == result.losses[0]
    healthy = train(f"{flags} --save {tmp_path / 'healthy'}")
    means = [loss["lm loss"] for loss in result.losses]
    assert sum(means) / 4 == pytest.approx(healthy.losses[2], rel=1e-7)  # dropout's masks are those of step 3


def test_further_flags_replace_those_of_the_run(corpus: str, tmp_path: Path) -> None:
    train(
        f"--data-path {corpus} --eval-iters 0 --train-iters 2 --bf16 --nonfinite-dump-dir {tmp_path}",
        before=overflow_in_layer_1,
    )
    dump = read_dump(tmp_path / "iteration_0000001")
    words = command_of(dump, ["--fp64", "--hidden-dropout", "0"])
    assert "--bf16" not in words and words.count("--fp64") == 1 and words[-2:] == ["--hidden-dropout", "0"]
    result = replay(dump, GPT, words=["--fp64"])
    assert any(line.startswith("everything is finite with --fp64") for line in report(dump, result, ["--fp64"]))
    assert result.findings == []  # 3e38 times activations overflows in bfloat16 and float32, not in float64


FACTS = {"iteration": 3, "micro_batch_size": 1, "data_parallel_size": 1, "findings": []}


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        ("[" * 5000, "report.json: nested too deeply"),
        ("[]", "report.json: the value is a list of 0, not an object"),
        (json.dumps({**FACTS, "data_parallel_size": -1}), "data_parallel_size is -1, not an integer"),
        (json.dumps({**FACTS, "findings": [{"rank": 0}]}), r"findings\[0\].phase is missing"),
        (json.dumps({**FACTS, "findings": "none"}), 'findings is "none", not a list'),
    ],
)
def test_a_forged_report_is_refused(tmp_path: Path, report: str, sentence: str) -> None:
    (tmp_path / REPORT).write_text(report)
    with pytest.raises(UserError, match=sentence):
        read_dump(tmp_path)


@pytest.mark.parametrize(
    "described", ["[" * 5000, "7", '[{"kind": "Path", "plain": {}}]', "[]", '[{"kind": "Batch", "plain": {"x": 1}}]']
)
def test_forged_batches_are_refused(tmp_path: Path, described: str) -> None:
    (tmp_path / REPORT).write_text(json.dumps(FACTS))
    save_file({"0|tokens": torch.ones(1)}, tmp_path / "batch_dp_00000.safetensors", {"batches": described})
    with pytest.raises(UserError, match=r"batch_dp_00000.safetensors: "):
        read_dump(tmp_path)


@pytest.mark.parametrize("name", [REPORT, "batch_dp_00000.safetensors"])
@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    if name != REPORT:
        (tmp_path / REPORT).write_text(json.dumps(FACTS))
    with special_file(tmp_path / name, kind), pytest.raises(UserError, match=rf"{name}: it is a"):
        read_dump(tmp_path)


def test_an_incomplete_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not the whole dump of a step .*report.json"):
        read_dump(tmp_path)
    (tmp_path / REPORT).write_text(json.dumps(FACTS))
    with pytest.raises(UserError, match=r"batch_dp_00000"):
        read_dump(tmp_path)
    write_batches(tmp_path / "batch_dp_00000.safetensors", [{"tokens": torch.ones(1)}])
    with pytest.raises(UserError, match="holds no checkpoint of the state before the step"):
        read_dump(tmp_path)


def test_batches_of_all_kinds_come_back(tmp_path: Path) -> None:
    rows = torch.arange(6).view(1, 6)
    packed = Batch(rows, rows + 1, rows.float(), rows, cu_seqlens=torch.tensor([0, 2, 6]), max_seqlen=4)
    write_batches(tmp_path / "file", [packed, {"tokens": rows.t()}])
    first, second = read_batches(tmp_path / "file")
    assert isinstance(first, Batch) and torch.equal(first.labels, rows + 1) and first.sample_ids is None
    assert first.max_seqlen == 4 and torch.equal(second["tokens"], rows.t())
    with pytest.raises(UserError, match="the batches are of type list"):
        write_batches(tmp_path / "other", [[rows]])
    with pytest.raises(UserError, match="the entry 'texts' of the batches is no tensor"):
        write_batches(tmp_path / "other", [{"texts": ["a"]}])
