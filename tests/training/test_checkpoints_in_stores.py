"""Runs that save into an object store and continue from it, in other layouts, as from a folder."""

from pathlib import Path

import pytest
from support.command_lines import problems_of
from support.processes import run_on_ranks
from support.runs import TINY, train
from support.stores import faults, store_in

from megatron.core.exceptions import UserError
from megatron.core.utils.store_path import place
from megatron.training.arguments import configure
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment
from tools.checkpoint import inspect, verify


def test_a_run_continues_from_a_store_bit_equal_to_one_on_disk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, disk = store_in(tmp_path), str(tmp_path / "disk")
    for save, more in ((url, "--async-save"), (disk, "")):
        train(f"--mock-data --train-iters 4 --exit-interval 2 --save-interval 1 --keep-last 2 --save {save} {more}")
    again = [train(f"--mock-data --train-iters 4 --load {load} --save {load}") for load in (url, disk)]
    assert again[0].losses == again[1].losses and len(again[0].losses) == 2
    assert sorted(path.name for path in place(url).iterdir() if path.is_dir()) == [
        f"iter_{iteration:07d}" for iteration in (1, 2, 4)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "store"]
    told = capfd.readouterr()
    assert f"successfully saved checkpoint from iteration       2 to {url}" in told.out + told.err
    assert inspect.main(["--load", url]) == 0 and verify.main(["--load", url]) == 0
    assert "iteration 4" in capfd.readouterr().out


def test_a_save_that_fails_ends_the_run_and_the_checkpoint_before_it_stays(tmp_path: Path) -> None:
    url = store_in(tmp_path)
    train(f"--mock-data --train-iters 4 --exit-interval 2 --save {url}")
    with faults(url, broken_link="manifest.json"), pytest.raises(UserError, match="this checkpoint is not written"):
        train(f"--mock-data --train-iters 4 --load {url} --save {url}")
    with faults(url, expired=True), pytest.raises(UserError, match="renew the credentials"):
        train(f"--mock-data --train-iters 4 --load {url}")
    words = f"{TINY} --mock-data --train-iters 4 --load {url}".split()
    with faults(url, expired=True), pytest.raises(ConfigurationError, match="renew the credentials"):
        configure(words, launch_environment=LaunchEnvironment(1, False, looks_at_files=True))
    assert len(train(f"--mock-data --train-iters 4 --load {url}").losses) == 2


def losses_of(flags: str) -> object:
    """Trains on a rank of a world, which knows the store of these tests by the imports of this module."""
    return train(flags).losses


@pytest.mark.slow
def test_another_layout_continues(tmp_path: Path) -> None:
    url, disk = store_in(tmp_path), str(tmp_path / "disk")
    layout = "--tensor-model-parallel-size 2"
    for save in (url, disk):
        run_on_ranks(losses_of, 2, f"--mock-data --train-iters 4 --exit-interval 2 --save {save} {layout}")
    runs = [train(f"--mock-data --train-iters 4 --load {load}") for load in (url, disk)]
    assert runs[0].losses == runs[1].losses and len(runs[0].losses) == 2
    losses = [run_on_ranks(losses_of, 2, f"--mock-data --train-iters 4 --load {load} {layout}") for load in (url, disk)]
    assert losses[0] == losses[1]


def test_flags_that_need_a_folder_on_disk() -> None:
    problems = problems_of("--save memory://run --log-progress --save-hf-interval 5 --save-interval 5 --profile")
    assert problems == [
        "--save-hf-interval writes files under --save memory://run, which must be a folder on disk for it",
        "--log-progress writes files under --save memory://run, which must be a folder on disk for it",
        "--profile writes into --tensorboard-dir: give one, since --save memory://run is no folder on disk",
    ]
    (problem,) = problems_of("--load unheardof://run")
    assert "unheardof:// is no kind of store that fsspec knows" in problem
