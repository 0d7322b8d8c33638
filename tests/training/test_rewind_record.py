"""The decisions of a rewinding run: windows, outdated checkpoints, the file beside the checkpoints, flags."""

import json
from pathlib import Path

import pytest
from support.command_lines import configured, problems_of
from support.processes import run_on_ranks
from support.small_run import SmallRun

from megatron.core.exceptions import UserError
from megatron.training.checkpoints import Checkpoints
from megatron.training.rewind_record import RECORD, Rewind, Rewinds, read_record, write_record

FIRST, SECOND = Rewind(spike=8, iteration=4, first=6), Rewind(spike=20, iteration=16, first=18)


def test_windows_are_left_out_each_once() -> None:
    found = Rewinds([FIRST, SECOND, Rewind(spike=8, iteration=2, first=6)])
    assert found.decisions == [FIRST, SECOND] and found.describe() == "6 to 8 and 18 to 20"
    assert [number for number in range(30) if found.leaves_out(number)] == [6, 7, 8, 18, 19, 20]


def test_a_checkpoint_is_outdated_if_it_has_learned_from_a_window() -> None:
    decided = Rewinds([FIRST, SECOND])
    assert decided.missing_in(5, Rewinds()) is None  # from before the window
    assert decided.missing_in(6, Rewinds()) == FIRST
    assert decided.missing_in(17, Rewinds([FIRST])) is None
    assert decided.missing_in(18, Rewinds([FIRST])) == SECOND
    assert decided.missing_in(30, decided) is None


def test_the_file_holds_what_was_written(tmp_path: Path) -> None:
    assert read_record(tmp_path / "none").decisions == []
    write_record(tmp_path / "new", Rewinds([FIRST, SECOND]))
    assert read_record(tmp_path / "new").decisions == [FIRST, SECOND]
    assert json.loads((tmp_path / "new" / RECORD).read_text())["rewinds"][0] == {"spike": 8, "iteration": 4, "first": 6}
    write_record(tmp_path / "new", Rewinds())
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"rewinds": 3}', '{"rewinds": [{"spike": 8}]}', '{"rewinds": [[]]}', "\udcff"]
)
def test_a_damaged_file_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / RECORD).write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=r"rewinds.json does not hold what a run writes about its loss spikes"):
        read_record(tmp_path)


def test_a_file_that_cannot_be_written_or_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / RECORD).mkdir()
    with pytest.raises(UserError, match=r"rewinds.json: Is a directory; the run cannot go back from a loss spike"):
        write_record(tmp_path, Rewinds([FIRST]))
    with pytest.raises(UserError, match=r"rewinds.json: it is a folder"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("--keep-last 1 --loss-spike-rewind-window 2", 2),
        ("--keep-last 1 --loss-spike-rewind-window 1", None),
        ("--keep-last 2 --loss-spike-rewind-window 101", None),
        ("--keep-last 2 --loss-spike-rewind-window 102", 3),
        ("--save-retain-interval 1000 --loss-spike-rewind-window 2", 2),
        ("--save-retain-interval 1000 --keep-last 2 --loss-spike-rewind-window 101", None),
    ],
)
def test_enough_checkpoints_are_kept_to_go_back(flags: str, needed: int | None) -> None:
    found = problems_of(f"--loss-spike-action rewind --save x --save-interval 100 {flags}")
    assert len(found) == (needed is not None)
    assert needed is None or found[0].endswith(f"with --save-interval 100 give --keep-last {needed} or more")


def test_the_first_rank_decides_whether_a_checkpoint_is_under_save(tmp_path: Path) -> None:
    """On the second rank's node a link leads elsewhere: --load and --save are one folder for the first rank only."""
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    assert run_on_ranks(_resumed, 2, tmp_path) == [(2, [])] * 2


def _resumed(folder: Path) -> tuple[int | None, list[int]]:
    run = SmallRun.make(f"--save {folder / 'saved'}").train(2)
    run.save()
    again = SmallRun.make(f"--save {folder / 'saved'} --load {folder / 'link'}")
    own = Path.resolve
    if run.checkpoints.groups.global_rank == 1:
        Path.resolve = lambda path, strict=False: path  # type: ignore[method-assign]
    try:
        again.load()
    finally:
        Path.resolve = own  # type: ignore[method-assign]
    return again.checkpoints.last_saved, again.checkpoints.record.state_dict().get("earlier_run", [])


def test_a_script_that_begins_anew_and_then_loads_takes_the_loaded_checkpoints_for_its_own(tmp_path: Path) -> None:
    """A script may look for a checkpoint in one folder and then in another. The last answer counts."""
    run = SmallRun.make(f"--save {tmp_path}").train(1)
    run.save()
    run.train(1).save()
    script = SmallRun.make(f"--save {tmp_path} --load {tmp_path / 'none'}")
    record = script.checkpoints.record
    assert not script.load() and record.state_dict() == {"earlier_run": [1, 2]}
    config = configured(f"--save {tmp_path} --load {tmp_path}")
    assert Checkpoints(config, script.checkpoints.groups, record).load(script.parts)
    assert record.state_dict() == {}
    assert record.newest_before(2) == (tmp_path, 1)
    write_record(tmp_path, Rewinds([FIRST]))
    script.train(1).save()
    assert read_record(tmp_path).decisions == [FIRST]
