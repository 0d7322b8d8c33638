"""What a run of days meets: memory and files that must not grow, a signal inside a save, a folder that goes away."""

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.launch import launch
from support.runs import GPT, train

from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.exceptions import UserError
from megatron.training import pretrain
from megatron.training.checkpoints import Checkpoints
from megatron.training.hooks.hook import Hook
from megatron.training.providers import Providers
from megatron.training.trainer import Trainer

pytestmark = pytest.mark.slow

PARTS = GPT.build_model, GPT.build_datasets, GPT.build_forward_step


class Sizes(Hook):
    """Prints the memory of the process, in pages, and its open files."""

    def after_step(self, iteration: int) -> None:
        if iteration % 1000 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            print(f"sizes {pages} {len(os.listdir('/proc/self/fd'))}", flush=True)


def pretrain_and_measure() -> None:
    pretrain(Providers(*PARTS, build_hooks=lambda context: [Sizes()]))


@pytest.mark.timeout(1800)
def test_memory_and_files_stay_flat_over_5000_iterations(tmp_path: Path, corpus: str) -> None:
    flags = f"--data-path {corpus} --train-iters 5000 --num-workers 1 --eval-interval 500 --eval-iters 1 "
    flags += f"--log-interval 250 --save {tmp_path / 'c'} --save-interval 500 --keep-last 2 "
    flags += f"--tensorboard-dir {tmp_path / 'board'}"
    program = launch(flags, 0, tmp_path, pretrain_and_measure)
    assert program.exit_codes(1500) == [0], program.output(0)
    lines = [line.split()[1:] for line in program.output(0).splitlines() if line.startswith("sizes ")]
    (pages, files), *_, (pages_later, files_later) = (map(int, words) for words in lines)
    assert files_later <= files
    assert (pages_later - pages) * os.sysconf("SC_PAGE_SIZE") < 8 << 20


def pretrain_and_save_slowly() -> None:
    contents = Checkpoints._contents

    def slowly(self: Checkpoints, *args: Any) -> Any:
        print("inside a save", flush=True)
        time.sleep(1.0)
        return contents(self, *args)

    with mock.patch.object(Checkpoints, "_contents", slowly):
        pretrain(Providers(*PARTS))


def test_a_signal_inside_a_save(tmp_path: Path, corpus: str) -> None:
    flags = f"--data-path {corpus} --train-iters 20000 --eval-iters 0 --save {tmp_path / 'c'} --save-interval 2"
    program = launch(flags, 2, tmp_path, pretrain_and_save_slowly)
    program.wait_for(1, "inside a save")
    program.signal(1, signal.SIGTERM)
    assert program.exit_codes() == [0, 0], program.output(1)
    newest = find_checkpoint(tmp_path / "c")
    assert newest is not None
    end = f"exiting program after receiving SIGTERM on rank 1 (iteration {newest.manifest.iteration})"
    assert end in program.output(1)


class GoesAway(Hook):
    """Takes the folder away after a step."""

    def __init__(self, folder: Path, left: str) -> None:
        self.folder, self.left = folder, left

    def after_step(self, iteration: int) -> None:
        if iteration == 3:
            self.folder.rename(self.folder.with_name("elsewhere"))
            if self.left == "a file":
                self.folder.write_text("")


def add(run: Trainer, hook: Hook) -> None:
    run.hooks.hooks = (*run.hooks.hooks, hook)


@pytest.mark.parametrize("left", ["nothing", "a file"])
def test_a_folder_that_goes_away(tmp_path: Path, corpus: str, left: str) -> None:
    """A folder that is gone is made again; one that cannot be made is one error. Earlier checkpoints are whole."""
    save = tmp_path / "c"
    flags = f"--data-path {corpus} --train-iters 6 --eval-iters 0 --save {save} --save-interval 2"
    before = partial(add, hook=GoesAway(save, left))
    if left == "nothing":
        train(flags, before=before)
        newest = find_checkpoint(save)
        assert newest is not None and newest.manifest.iteration == 6
    else:
        with pytest.raises(UserError, match=str(save)):
            train(flags, before=before)
    elsewhere = find_checkpoint(tmp_path / "elsewhere")
    assert elsewhere is not None and elsewhere.manifest.iteration == 2
    shutil.rmtree(tmp_path / "elsewhere")
