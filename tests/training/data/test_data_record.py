"""Whether a resumed run reads its samples in the order of the run that saved the checkpoint."""

import json
from pathlib import Path

import pytest
from support.runs import train, write_documents

from megatron.training.data.data_record import data_differences, order_differences, order_of

WARNING = "WARNING: the order of the training samples is not that of the checkpoint"


def warnings_of(flags: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    train(f"{flags} --eval-iters 0 --override-opt-param-scheduler")
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(WARNING)]


def test_a_longer_run_with_more_epochs_reads_other_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Epochs are shuffled together. A run that is longer within an epoch keeps the order."""
    data = f"--data-path {write_documents(tmp_path / 'a')} --split 1"
    train(f"{data} --train-iters 2 --eval-iters 0 --save {tmp_path / 'run'}")
    resumed = f"{data} --load {tmp_path / 'run'} --exit-interval 3"
    assert warnings_of(f"{resumed} --train-iters 4", capsys) == []
    (warning,) = warnings_of(f"{resumed} --train-iters 5000", capsys)
    assert "some of the 8 samples that it has trained on come again" in warning
    assert f"{tmp_path / 'a'}: shuffled over " in warning and warning.endswith("(was shuffled over 1 epochs)")
    assert (
        warnings_of(f"{data} --load {tmp_path / 'run'} --finetune --train-iters 5000 --exit-interval 1", capsys) == []
    )


def test_weights_that_changed_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (write_documents(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    file = tmp_path / "blend.txt"
    file.write_text(f"30 {first} 70 {second}")
    flags = f"--data-args-path {file} --split 1"
    train(f"{flags} --train-iters 2 --eval-iters 0 --save {tmp_path / 'run'}")
    assert warnings_of(f"{flags} --load {tmp_path / 'run'} --train-iters 3", capsys) == []
    file.write_text(f"60 {first} 40 {second}")
    (warning,) = warnings_of(f"{flags} --load {tmp_path / 'run'} --train-iters 3", capsys)
    assert f"{first}: 60% of the samples, shuffled over 1 epochs (was 30% of the samples" in warning


def test_only_stages_that_the_checkpoint_has_reached_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (write_documents(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    file = tmp_path / "stages.json"

    def flags(start: int, second_stage: str) -> str:
        stages = [{"from_sample": 0, "data_path": first}, {"from_sample": start, "data_path": second_stage}]
        file.write_text(json.dumps(stages))
        return f"--data-stages {file} --split 1"

    train(f"{flags(8, second)} --train-iters 3 --exit-interval 2 --eval-iters 0 --save {tmp_path / 'run'}")
    resumed = f"--load {tmp_path / 'run'} --train-iters 3"
    assert warnings_of(f"{flags(8, first)} {resumed}", capsys) == []
    (warning,) = warnings_of(f"{flags(4, second)} {resumed}", capsys)
    assert f"stage from sample 4: 100% {second} (was none)" in warning and "sample 8" not in warning


def test_other_loaders_and_many_changes() -> None:
    assert order_of([object()], "external") == {}
    assert list(order_differences({"a": "1"}, {}, 4)) == []  # a checkpoint of an older release
    assert list(order_differences({"a": "1"}, {"a": "2"}, 0)) == []
    (warning,) = order_differences({str(i): "1" for i in range(5)}, {str(i): "2" for i in range(5)}, 4)
    assert warning.endswith("0: 1 (was 2); 1: 1 (was 2); 2: 1 (was 2); and 2 more")


def test_the_loader_and_the_length_of_a_cyclic_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"--data-path {write_documents(tmp_path / 'a')} --split 1"
    train(f"{data} --train-iters 2 --eval-iters 0 --save {tmp_path / 'run'}")
    (warning,) = warnings_of(f"{data} --load {tmp_path / 'run'} --train-iters 3 --dataloader-type cyclic", capsys)
    assert "--dataloader-type: cyclic, " in warning and warning.endswith(" samples a pass (was single)")


def test_a_resumed_run_says_which_data_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = write_documents(tmp_path / "data", seed=1), tmp_path / "run"
    flags = f"--eval-iters 0 --train-iters 3 --save {run} --load {run} --save-interval 1 --data-path"
    train(f"{flags} {data} --exit-interval 1")
    manifest = json.loads((run / "iter_0000001/manifest.json").read_text())
    assert list(manifest["config"]["data"]) == [data]
    train(f"{flags} {data} --exit-interval 2")
    assert "its content" not in capsys.readouterr().out
    write_documents(tmp_path / "data", seed=2)
    train(f"{flags} {data}")
    assert f"data {data}: its content has changed since the checkpoint was saved" in capsys.readouterr().out


def test_made_up_data_has_no_digest(tmp_path: Path) -> None:
    train(f"--mock-data --eval-iters 0 --train-iters 1 --save {tmp_path}")
    assert "data" not in json.loads((tmp_path / "iter_0000001/manifest.json").read_text())["config"]


def test_moved_and_new_data() -> None:
    before = {"old/a": "1", "b": "2"}
    assert list(data_differences({"old/a": "1", "b": "2"}, before)) == []
    assert list(data_differences({"new/a": "1", "b": "3", "c": "4"}, before)) == [
        "data new/a: has the content of old/a when the checkpoint was saved",
        "data b: its content has changed since the checkpoint was saved",
        "data c: new content, which the run that saved the checkpoint did not have",
    ]
