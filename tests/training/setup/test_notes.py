"""The notes that a run prints before it starts."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_lines import configured, without
from support.processes import run_on_ranks
from support.runs import TINY, train, write_documents

from megatron.core.exceptions import UserError
from megatron.data.preparation.config import available_cores
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.data.splits import ValidationSet
from megatron.training.setup import notes as setup_notes
from megatron.training.setup.notes import data_plan, holding_notes, run_notes
from megatron.training.trainer import Trainer


def notes(
    flags: str,
    *,
    valid: Any = "data",
    test: Any = "data",
    whole: int | None = None,
    source: str = "--mock-data",
    device: str = "cpu",
) -> list[str]:
    config = configure(
        f"{TINY} --eval-iters 1 {source} --train-iters 4 {flags}".split(),
        launch_environment=LaunchEnvironment(1, False),
    )
    environment: Any = SimpleNamespace(groups=SimpleNamespace(size=lambda axis: 1), device=SimpleNamespace(type=device))
    valid_sets = [] if whole is None else [ValidationSet(open=iter, num_samples=whole)]
    splits: Any = SimpleNamespace(valid=valid, test=test, valid_sets=valid_sets)
    return list(run_notes(config, environment, splits))


def test_a_recurrence_without_its_kernel_is_said() -> None:
    delta = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2"
    slow = "layers of gated_delta_net pass their states by plain torch: the fast kernels are for --bf16"
    assert slow in notes(delta, device="cuda")
    assert slow not in notes(f"{delta} --bf16", device="cuda") + notes(delta) + notes("", device="cuda")


def test_an_ordinary_run_says_how_much_is_evaluated() -> None:
    assert notes("--eval-interval 2 --eval-iters 3") == [
        "an evaluation takes 3 global batches, 12 samples, not a whole data set"
    ]


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--fp16", "--fp16 on a CPU: products and sums are computed in float32 and rounded to float16"),
        ("--eval-iters 0", "--eval-iters 0: nothing is evaluated, neither in between nor at the end"),
        ("", "without --eval-interval the validation data is looked at once, after the last iteration"),
    ],
)
def test_what_a_user_may_not_expect_is_said(flags: str, note: str) -> None:
    assert note in notes(flags)


def test_more_workers_than_cores_are_said_with_a_number_that_works() -> None:
    cores = available_cores()
    (note,) = [note for note in notes("--num-workers 400") if note.startswith("--num-workers 400: ")]
    assert f"{cores} cores" in note and f"--num-workers {cores} or less" in note
    assert not any(note.startswith("--num-workers") for note in notes(f"--num-workers {cores}"))


def test_a_run_says_who_holds_what(capsys: pytest.CaptureFixture[str]) -> None:
    train("--mock-data --train-iters 1 --eval-iters 0")
    assert "this process holds embedding, layers 1 to 2, head and loss: 27,296 parameters\n" in capsys.readouterr().out
    assert (
        run_on_ranks(_held, 4)
        == [
            [
                "each of 2 ranks of pipeline rank 0 holds embedding, layer 1: 6,960 to 8,272 parameters",
                "each of 2 ranks of pipeline rank 1 holds layer 2, head and loss: 6,512 to 7,824 parameters",
            ]
        ]
        * 4
    )


def _held() -> list[str]:
    """The model is split over two pipeline and two tensor parallel ranks."""
    found: list[list[str]] = []

    def before(run: Trainer) -> None:
        found.append(holding_notes(run.model, run.environment.groups, run.config.transformer))

    split = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    train(f"--mock-data --train-iters 1 --eval-iters 0 {split}", before=before)
    return found[0]


def test_missing_splits_are_named_and_nothing_to_do_is_an_error() -> None:
    assert "there is no test data: no loss on it will be printed" in notes("", test=None)
    assert "there is no validation and no test data: no loss on it will be printed" in notes("", valid=None, test=None)
    with pytest.raises(UserError, match=r"--skip-train: there is no validation and no test data"):
        notes("--skip-train", valid=None, test=None)


def test_one_batch_of_one_sample_is_singular() -> None:
    assert notes("--eval-interval 2 --eval-iters 1 --eval-global-batch-size 1 --eval-micro-batch-size 1") == [
        "an evaluation takes 1 global batch, 1 sample, not a whole data set"
    ]
    said = notes("--eval-interval 2 --eval-global-batch-size 4", whole=3, source="--data-path corpus")
    assert said == ["a validation takes the whole set, 1 global batch"]


def test_a_whole_validation_set_is_said() -> None:
    said = notes("--eval-interval 2 --eval-global-batch-size 4", whole=25, source="--data-path corpus")
    assert said == ["a validation takes the whole set, 7 global batches"]
    (made_up,) = notes("--eval-interval 2 --eval-iters 3 --eval-global-batch-size 4", whole=50000)
    assert made_up == (
        "a validation takes the whole set, 12,500 global batches; without --full-validation it takes 3 (--eval-iters)"
    )
    with pytest.raises(UserError, match="the validation set is empty"):
        notes("--eval-interval 2", whole=0)


def test_more_data_files_than_a_process_keeps_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup_notes, "most_open_files", lambda: 1)
    both = " ".join(write_documents(tmp_path / name) for name in "ab")
    (note,) = setup_notes._open_file_notes(configured(f"--data-path {both}", base=without("--mock-data")))
    assert note.startswith("the data has 2 .bin files, of which a process keeps 1 open (half of ulimit -n)")
    assert list(setup_notes._open_file_notes(configured(""))) == []


def test_each_data_set_of_each_split_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (write_documents(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    flags = "--train-iters 2 --eval-iters 1 --eval-interval 1"
    train(f"{flags} --data-path 30 {first} 70 {second}")
    lines = [line for line in capsys.readouterr().out.splitlines() if " data: " in line and "samples of" in line]
    assert [line.partition(",")[0] for line in lines] == [
        f"training data: 2 samples of {first}",
        f"training data: 6 samples of {second}",
        f"validation data: 1 samples of {first}",
        f"validation data: 3 samples of {second}",
        f"test data: 1 samples of {first}",
        f"test data: 3 samples of {second}",
    ]
    tokens = int(lines[0].rpartition(" ")[2].replace(",", ""))
    assert lines[0].endswith(f", 32 tokens, {32 / tokens:.3g} epochs of its {tokens:,}") and tokens > 1000
    stages = tmp_path / "stages.json"
    content = [{"from_sample": 0, "data_path": [first]}, {"from_sample": 4, "data_path": ["50", first, "50", second]}]
    stages.write_text(json.dumps(content))
    train(f"{flags} --data-stages {stages}")
    printed = capsys.readouterr().out
    assert f"training data: 6 samples of {first}," in printed and f"training data: 2 samples of {second}," in printed
    train(f"{flags} --data-path {first} --full-validation")
    printed = capsys.readouterr().out
    assert f"training data: 8 samples of {first}," in printed
    assert re.search(r"validation data: .*, (1|0\.9\d*) epochs of", printed)


def test_many_data_sets_share_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_notes, "MOST_LINES", 1)
    first, second = (write_documents(tmp_path / name) for name in "ab")
    train(f"--train-iters 2 --eval-iters 0 --data-path 30 {first} 70 {second}")
    assert "training data: 6 samples of 1 more data sets\n" in capsys.readouterr().out


def test_made_up_data_and_that_of_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    train("--mock-data --train-iters 1 --eval-iters 0")
    assert "training data: 4 samples of made-up data\n" in capsys.readouterr().out
    assert list(data_plan((iter([1]), None, [object()]), (4, None, None), 16)) == []
