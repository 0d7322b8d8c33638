"""--dry-run: what it says is what a run is, to the byte where it can be."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.command_lines import SMALL, configured
from support.programs import python
from support.runs import TINY, train

from megatron.core.exceptions import UserError
from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.diagnosis.dry_run.dry_run import dry_run
from megatron.diagnosis.dry_run.report import print_dry_run, report_lines
from megatron.training.providers import Providers
from pretrain_gpt import build_model

ROOT = Path(__file__).parents[3]


PROVIDERS = Providers(build_model, lambda context, counts: [], lambda context: lambda data, model: None)  # type: ignore[arg-type,return-value]


def test_numbers_of_a_known_model() -> None:
    config = configured(
        "--vocab-size 50256 --global-batch-size 64 --train-iters 1000",
        base="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 4 --lr 1 "
        "--mock-data --tokenizer-type NullTokenizer",
        ranks=8,
    )
    run = dry_run(config, PROVIDERS)
    assert run.parameters == 124_439_808  # GPT-2 small
    assert (run.vocab_size, run.padded_vocab_size) == (50257, 50304)
    assert run.tokens_per_step == 64 * 1024 and run.microbatches_per_step == 2
    text = "\n".join(report_lines(config, run))
    assert "1,000 steps, 65,536,000 tokens" in text and "= tensor 1 x pipeline 1 x context 1 x data 8" in text


def test_epochs_over_the_data(tmp_path: Path) -> None:
    for name, documents in (("a", 10), ("b", 30)):
        with IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16) as builder:
            for _ in range(documents):
                builder.add_item(np.arange(100, dtype=np.uint16))
                builder.end_document()
            builder.finalize(str(tmp_path / f"{name}.idx"))
    base = SMALL.replace("--mock-data", f"--data-path 1 {tmp_path}/a 3 {tmp_path}/b --split 90,10,0")
    config = configured("--train-iters 100", base=base)
    first, second = dry_run(config, PROVIDERS).data
    wanted = 100 * 2 * 128
    assert (first.tokens, second.tokens) == (900, 2700)
    stages = [{"from_sample": 0, "data_path": f"1 {tmp_path}/a"}, {"from_sample": 50, "data_path": f"1 {tmp_path}/b"}]
    (tmp_path / "stages.json").write_text(json.dumps(stages))
    base_of_stages = SMALL.replace("--mock-data", f"--data-stages {tmp_path}/stages.json --split 100,0,0")
    of_stages = dry_run(configured("--train-iters 100", base=base_of_stages), PROVIDERS).data
    assert [each.epochs for each in of_stages] == pytest.approx([50 * 128 / 1000, 150 * 128 / 3000])
    assert first.epochs == pytest.approx(wanted / 4 / 900) and second.epochs == pytest.approx(wanted * 3 / 4 / 2700)


def test_what_a_run_lacks_is_said_and_no_error() -> None:
    base = " ".join(word for word in SMALL.split() if word not in ("--mock-data", "--train-iters", "10"))
    config = configured("--dry-run", base=base)
    assert "training    length not given" in list(report_lines(config, dry_run(config, PROVIDERS)))


def test_data_and_tokenizers_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(base=SMALL.replace("--mock-data", "--data-path no/such/prefix"))
    with pytest.raises(UserError, match="no/such/prefix"):
        dry_run(config, PROVIDERS)
    with pytest.raises(SystemExit) as caught:
        print_dry_run(config, PROVIDERS)
    assert caught.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """On a machine without the checkpoint nothing is compared."""
    train(f"--mock-data --train-iters 1 --eval-iters 0 --save {tmp_path}")
    flags = f"{TINY} --mock-data --train-iters 1 --load"
    same = dry_run(configured(str(tmp_path), base=flags), PROVIDERS)
    for other, message in (
        (f"{tmp_path} --num-layers 3", "--num-layers is 3 in this run and 2 in the checkpoint"),
        (f"{tmp_path} --min-lr 1e-4", "--min-lr is 0.0001 in this run and 0.0 in the checkpoint"),
        (f"{tmp_path} --vocab-size 50", "gives a vocabulary of 51 ids in this run, but the checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            dry_run(configured(other, base=flags), PROVIDERS)
    assert dry_run(configured(f"{tmp_path}/elsewhere", base=flags), PROVIDERS).parameters == same.parameters


@pytest.mark.parametrize(("flags", "code"), [("", 0), (" --tensor-model-parallel-size 3", 2), (" --print-config", 0)])
def test_the_program(flags: str, code: int) -> None:
    """No process group is touched: eight ranks are asked for and nobody else is there."""
    result = subprocess.run(
        [python(), "pretrain_gpt.py", *(SMALL + " --dry-run" + flags).split()],
        cwd=ROOT,
        env={**os.environ, "WORLD_SIZE": "8", "RANK": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert result.returncode == code, result.stderr
    assert ("memory " in result.stdout) == (code == 0)
    assert ("num_layers: " in result.stdout) == ("--print-config" in flags)
    if code:
        lines = result.stderr.splitlines()
        assert lines[0].startswith("error: --tensor-model-parallel-size 3 does not divide --num-attention-heads 4")
        assert lines[1].startswith("error: 8 ranks (WORLD_SIZE) are not divisible by 3") and len(lines) == 2
