"""tools/validate.py as its users call it: verdicts, exit codes, JSON, bad input."""

import json
import sys
from pathlib import Path

import pytest
from support.programs import python
from support.runs import TINY, write_documents

from tools.validate import main

CURVES = Path(__file__).resolve().parents[1] / "data/loss_curves"
FACTS = json.loads((CURVES / "data.json").read_text())


def validate(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Calls the tool in this process. Returns its exit code, output and errors."""
    try:
        code: object = main([str(word) for word in words])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert isinstance(code, int)
    return code, out, err


@pytest.mark.parametrize(("name", "code"), [("good-cosine", 0), ("shuffled-labels", 1)])
def test_a_finished_run(name: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    facts = ["--vocab-size", FACTS["vocabulary"], "--unigram-entropy", FACTS["unigram entropy"]]
    words = ["loss", "--run", CURVES / f"{name}.jsonl", *facts, "--json", tmp_path / "v.json"]
    found, out, err = validate(capsys, *words)
    assert found == code and not err and len(out.splitlines()) == 1
    assert json.loads((tmp_path / "v.json").read_text())["exit_code"] == code


def test_an_unsure_verdict_has_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = validate(capsys, "loss", "--run", CURVES / "good-cosine.jsonl", "--by-step", 30)
    assert code == 3 and out.startswith("UNSURE loss")


def test_throughput_of_a_finished_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [{"iteration": number, "tokens per second": 800.0 + number} for number in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["throughput", "--run", tmp_path, "--gpus", 8, "--target"]
    assert validate(capsys, *words, 100)[0] == 0
    code, out, _ = validate(capsys, *words, 150)
    assert code == 1 and out.startswith("FAIL throughput [below the target]: 102 tokens/s/GPU")
    assert "give --gpus" in validate(capsys, "throughput", "--run", tmp_path, "--target", 1)[2]


def test_gates_on_a_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python())
    flags = f"{TINY} --data-path {write_documents(tmp_path / 'data')} --train-iters 60 --save {tmp_path / 'mine'}"
    code, out, _ = validate(capsys, "throughput", "--target", 1, "--steps", 12, "--", *flags.split())
    assert code == 0 and out.startswith("PASS throughput: "), out
    kept = ["--output", tmp_path / "kept"]
    code, out, _ = validate(capsys, "loss", "--steps", 45, *kept, "--", "pretrain_gpt.py", *flags.split())
    assert (tmp_path / "kept/metrics.jsonl").is_file() and out.split()[1].startswith("loss")
    assert not (tmp_path / "mine").exists()


def test_memory_on_a_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python())
    flags = f"{TINY} --data-path {write_documents(tmp_path / 'data')} --train-iters 60 --reset-attention-mask"
    flags += " --num-experts 4 --expert-model-parallel-size 2"
    words = ["memory", "--steps", 2, "--json", tmp_path / "v.json", "--", *flags.split()]
    code, out, _ = validate(capsys, *words)
    assert code in (0, 1) and "resident memory of 2 ranks on a CPU" in out and "the most uneven routing" in out
    assert json.loads((tmp_path / "v.json").read_text())["figures"]["peak GiB"] > 0.05
    code, out, _ = validate(capsys, "memory", "--memory-gib", 0.01, *words[1:])
    assert code == 1 and out.startswith("FAIL memory [too little headroom]")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss"], "no run to judge; give --run FOLDER"),
        (["loss", "--run", "nowhere"], "there is no metrics.jsonl"),
        (["loss", "--run", "nowhere", "--", "pretrain_gpt.py"], "exclude each other"),
        (["resume", "--at", "12", "--", "--lr", "1"], "--at 12 must be between"),
        (["loss", "--run", "x", "--steps", "9"], "--steps is for a command after --, and has no effect with --run"),
        (["resume", "--run", "x"], "unrecognized arguments: --run x"),
        (["throughput", "--run", "x"], "--target"),
        (["throughput", "--target", "-3"], "give a number above 0"),
        (["loss", "--steps", "0"], "give a whole number, 1 or more"),
        (["memory", "--max-utilization", "900"], "expected a number from 1 to 100"),
        ([], "throughput|loss|resume|memory"),
        (["memory", "--", "nowhere.py"], "nowhere.py: no such script"),
        (["memory", "--output", __file__, "--", "pretrain_gpt.py"], "give a folder that is empty"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = validate(capsys, *words)
    assert code == 2 and not out and message in err
    assert len(err.splitlines()) == 1 and err.startswith("error: ")
