"""tools/plan.py as a user runs it: a specification in, the files of a plan out, and its exit codes."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from support.programs import python

from megatron.training.config.flag_table import flag_table
from tests.diagnosis.planning.specifications import specification

ROOT = Path(__file__).parents[2]
SMALL = {
    "params": "10M", "gpus": "2", "gpu": "H100 80GB", "seq-length": "256", "tokens": "20M",
    "tokenizer": "NullTokenizer (1000)", "deduplication": "none", "memory-utilization": "80%",
}  # fmt: skip


def run(folder: Path, *words: str, program: str = "tools/plan.py", **more: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "WORLD_SIZE")}
    return subprocess.run(
        [python(), str(ROOT / program), *words], cwd=folder, capture_output=True, text=True, env={**variables, **more}
    )


def flags(**changes: str | None) -> list[str]:
    values = {**SMALL, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plan of a small model on two nodes."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "spec.txt").write_text(
        specification(parameter="125M", total_gpus="8", gpus_per_node="4", total_tokens="2B")
    )
    done = run(folder, "spec.txt", "--output", "plan")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


def test_a_plan_says_layouts_and_why_others_lost(planned: Path) -> None:
    text = (planned / "stdout").read_text()
    assert " parameters: 6 layers of 1024, vocabulary 32,000 (scaled from llama3.2-1b)" in text
    best, _, lost = text.partition("why others lost")
    assert len([line for line in best.splitlines() if line.lstrip()[:2] in ("1 ", "2 ", "3 ")]) == 3
    assert "slower" in lost and "TP 4" in lost
    assert (planned / "plan/layouts.txt").read_text().splitlines()[0] in text


def test_every_value_of_run_yaml_has_a_reason(planned: Path) -> None:
    lines = (planned / "plan/run.yaml").read_text().splitlines()
    values = [line for line in lines if line and not line.startswith("#")]
    assert len(values) > 40
    for line in values:
        field, _, rest = line.partition(": ")
        assert field in flag_table() and len(rest.partition(" # ")[2]) > 5, line
    content = yaml.safe_load((planned / "plan/run.yaml").read_text())
    assert content["seq_length"] == 4096 and content["global_batch_size"] * content["train_iters"] * 4096 >= 2e9
    assert content["data_path"][:2] == ["0.7", "data/web_text_document"]
    assert "# specification, Checkpoint interval (spec.txt:30)" in next(x for x in lines if x.startswith("save_int"))


def test_run_yaml_alone_is_dry_before_data_and_tokenizer_exist(planned: Path, tmp_path: Path) -> None:
    whole = run(planned, "--config", "plan/run.yaml", "--dry-run", program="pretrain_gpt.py")
    assert whole.returncode == 0, whole.stderr
    assert "ranks       8 =" in whole.stdout
    assert "kept  ratio of code: 0.2" in whole.stdout and "open  tokenizer: Llama2Tokenizer" in whole.stdout
    (tmp_path / "run.yaml").write_text((planned / "plan/run.yaml").read_text())
    alone = run(tmp_path, "--config", "run.yaml", "--dry-run", program="pretrain_gpt.py")
    assert alone.returncode == 0 and "not here, so no clause is checked" in alone.stdout, alone.stderr
    real = run(tmp_path, "--config", "run.yaml", program="pretrain_gpt.py")
    assert real.returncode == 2 and "data_contract.json: no such file" in real.stderr
    changed = run(planned, "--config", "plan/run.yaml", "--dry-run", "--seq-length", "2048", program="pretrain_gpt.py")
    assert changed.returncode == 2
    assert "clause sequence length: the plan has 4,096 tokens, the run 2,048; use 4096" in changed.stderr


def test_mapping_and_checklist(planned: Path) -> None:
    mapping = (planned / "plan/mapping.txt").read_text()
    assert mapping.startswith("8 ranks on 2 nodes of 4 GPUs") and "layers 1 to" in mapping and "r7 " in mapping

    def check(*words: str, python_in: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "PATH": f"{python_in or Path(python()).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        command = ["bash", "plan/checklist.sh", *words]
        return subprocess.run(command, cwd=planned, capture_output=True, text=True, env=env)

    (planned / "python").write_text("#!/bin/false")  # of an environment without the package
    (planned / "python").chmod(0o755)
    listed = check("--list", python_in=planned)
    assert listed.returncode == 2 and "folder of pretrain_gpt.py, or install the wheel" in listed.stderr
    listed = check("--list")
    steps = [line.split()[0] for line in listed.stdout.splitlines()]
    assert steps[:5] == ["machines", "tokenizer", "data", "contract", "dry-run"] and steps[-1] == "launch"
    assert {"throughput", "memory", "resume", "loss"} < set(steps)
    failed = check("tokenizer")
    assert failed.returncode == 1 and "FAIL tokenizer" in failed.stderr
    (planned / "tokenizer").mkdir()
    (planned / "tokenizer/tokenizer.model").touch()
    passed = check("tokenizer")
    assert passed.returncode == 0 and "PASS tokenizer" in passed.stdout
    wrong = check("tea")
    assert wrong.returncode == 2 and "tea: no step of this checklist" in wrong.stderr


def test_flags_alone_and_standard_input(tmp_path: Path) -> None:
    check = {"throughput": "5M", "packing": "yes, dynamic context parallelism", "loss_check": "6.5 at step 40"}
    done = run(tmp_path, *flags(**check))
    assert done.returncode == 0 and "--- run.yaml" in done.stdout and "--- data contract" in done.stdout, done.stderr
    assert "note: FLAG: no deduplication method" in done.stdout
    assert "note: FLAG: throughput target 5,000,000 tokens/s/GPU (--throughput): the plan predicts " in done.stdout
    assert "hybrid_context_parallel: true" in done.stdout and "max_seqlen_per_dp_cp_rank: " in done.stdout
    assert "eval_interval: 40 " in done.stdout and "--by-step 40 --expected-loss 6.5" in done.stdout
    words = [python(), str(ROOT / "tools/plan.py"), "-", *flags(params="12M")]
    text = "Parameter count: 10M\nMax sequence length: 256"
    piped = subprocess.run(words, input=text, cwd=tmp_path, capture_output=True, text=True)
    assert piped.returncode == 0 and "note: --params 12M replaces 10M (-:1)" in piped.stdout, piped.stderr


def test_missing_values_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "spec.txt").write_text("MODEL DEFINITION\nArchitecture: Llama\nTotal GPUs: [your GPU count]\n")
    done = run(tmp_path, "spec.txt")
    questions = done.stdout.splitlines()
    assert done.returncode == 3 and len(questions) == 6 and all(line.endswith("?") for line in questions)
    assert done.stderr == ""
    one = run(tmp_path, *flags(tokens=None))
    assert one.returncode == 3 and one.stdout.startswith("On how many tokens") and len(one.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (flags(gpu="V100"), "GPU type V100: not known; known are h200"),
        (flags(gpu="H100 40GB"), "none with 40 GB; nearest: NVIDIA H100 SXM 80GB"),
        (flags(gpus="60", gpus_per_node="8"), "nearest: 56 or 64 GPUs"),
        (flags(throughput="90M"), "throughput target 90,000,000 tokens/s/GPU (--throughput) is "),
        (flags(tensor_parallel="4"), "tensor parallelism 4 (--tensor-parallel) is beyond the 2 GPUs"),
        (flags(data_parallel="3"), "does not divide 2 GPUs; use sizes whose product is 2"),
        (flags(vocab_size="500"), "less than the 1,000 ids of the tokenizer (--tokenizer), whose ids would be out of"),
        (flags(vocab_size="9000"), "8,000 entries would never be trained; nearest: 1,000"),
        (flags(data_mix="70% web"), "--data-mix 70% web: the ratios add up to 70, not 100; nearest: web 100%"),
        (flags(params="200B"), "do not fit 2 GPUs with 68.4 GB each"),
        (flags(tokenizer="NullTokenizer (5)", vocab_size="4"), "less than the 5 ids of the tokenizer"),
        (flags(gpus="1000000"), "divide; nearest: fewer GPUs, or a larger --global-batch-size"),
        (flags(params="lots"), "--params lots: expected a number above 0"),
        (["missing.txt"], "missing.txt: No such file or directory; give a specification"),
        (["--colour", "red"], "--colour: unknown flag"),
        ([*flags(), "--output", "taken"], "--output taken: run.yaml exists there; give another folder, or --overwrite"),
        (["--pin", "nowhere"], "nowhere/data_contract.json: No such file"),
        ([*flags(), "--global-batch-size", "0"], "--global-batch-size 0: must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/run.yaml").write_text("kept")
    done = run(tmp_path, *words)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
    assert (tmp_path / "taken/run.yaml").read_text() == "kept"


@pytest.mark.slow
def test_a_contract_is_pinned_kept_and_broken(tmp_path: Path) -> None:
    """From the plan to a run: two sources are prepared, pinned and trained on; then one of them changes."""
    done = run(tmp_path, *flags(gpus="1", data_mix="75% web, 25% code"), "--output", "plan", "--global-batch-size", "8")
    assert done.returncode == 0, done.stderr
    for name, count in (("web", 300), ("code", 100)):
        rows = [{"text": " ".join(str((7 * row + i) % 999) for i in range(400))} for row in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "data").mkdir(exist_ok=True)
        prepare(tmp_path, name, "none")
    pinned = run(tmp_path, "--pin", "plan")
    assert pinned.returncode == 0 and "plan/data_contract.json: pinned" in pinned.stdout, pinned.stderr
    train = ["--config", "plan/run.yaml", "--exit-interval", "1", "--micro-batch-size", "1", "--eval-iters", "0"]
    train += ["--num-layers", "1", "--save-interval", "100"]
    kept = run(tmp_path, *train, program="pretrain_gpt.py")
    assert kept.returncode == 0, kept.stderr
    assert "kept  file of code: data/code_text_document, 40,100 tokens, pinned" in kept.stdout
    ratio = run(
        tmp_path, *train, "--data-path", "0.5", "data/web_text_document", "0.5", "data/code_text_document",
        program="pretrain_gpt.py",
    )  # fmt: skip
    assert ratio.returncode == 2 and "clause ratio of web: the plan has 0.75, the run 0.5" in ratio.stderr
    (tmp_path / "code.jsonl").write_text(json.dumps({"text": "1 2 3 " * 400 + "1"}) + "\n")
    prepare(tmp_path, "code", "none")
    other = run(tmp_path, *train, program="pretrain_gpt.py")
    assert other.returncode == 2 and "clause file of code: SHA-256" in other.stderr
    assert "Traceback" not in other.stderr


@pytest.mark.slow
def test_seven_billion_parameters_on_64_gpus(tmp_path: Path) -> None:
    (tmp_path / "spec.txt").write_text(specification())
    done = run(tmp_path, "spec.txt", "--output", "plan")
    assert done.returncode == 0, done.stderr
    assert "6,738,415,616 parameters: 32 layers of 4096, vocabulary 32,000 (published llama2-7b)" in done.stdout
    assert "needs" in done.stdout.partition("why others lost")[2]
    dry = run(tmp_path, "--config", "plan/run.yaml", "--dry-run", program="pretrain_gpt.py")
    assert dry.returncode == 0 and "parameters  6,738,415,616" in dry.stdout, dry.stderr


def prepare(folder: Path, name: str, deduplication: str) -> None:
    words = ["--input", f"{name}.jsonl", "--output-prefix", f"data/{name}", "--append-eod", "--workers", "1"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "999", "--deduplication", deduplication]
    done = run(folder, *words, program="tools/preprocess_data.py")
    assert done.returncode == 0, done.stderr
