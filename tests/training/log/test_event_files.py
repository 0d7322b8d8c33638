"""megatron/training/log/event_files.py: damaged files and other points. test_tensorboard.py has whole runs."""

from pathlib import Path

import pytest

from megatron.training.log.event_files import supersede_events

pytest.importorskip("tensorboard")


def write(folder: Path, points: list[tuple[str, int]]) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for tag, step in points:
            writer.add_scalar(tag, 1.0, step)
    (path,) = folder.glob("*tfevents*")
    return path


@pytest.mark.parametrize("end", [-5, -30])
def test_a_file_that_a_kill_cut_off_is_read_to_its_last_whole_record(tmp_path: Path, end: int) -> None:
    path = write(tmp_path, [("loss", 1), ("loss vs samples", 4), ("loss", 2), ("loss vs samples", 8), ("loss", 3)])
    content = path.read_bytes()
    path.write_bytes(content[:end] + bytes([255]) * (end == -30) * 30)
    (sentence,) = supersede_events(tmp_path, 1, 4)
    assert sentence.startswith(f"{path}: 2 points beyond iteration 1: moved to ")
    assert len(path.read_bytes()) < len(content) and not list(supersede_events(tmp_path, 1, 4))


def test_points_without_a_pair_decide_nothing(tmp_path: Path) -> None:
    """A script may count its steps in tokens."""
    write(tmp_path, [("tokens of mine", 10**9), ("loss", 1), ("loss vs samples", 4), ("loss", 2)])
    assert list(supersede_events(tmp_path, 1, 4)) == []
