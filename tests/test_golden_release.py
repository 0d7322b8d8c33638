"""Every release so far: its checkpoint resumes, its settings keep their values, its public names their parameters.

A test that fails says that scripts or checkpoints of that release break. docs/api.md has the rules: what may change,
how it is announced, and for how long the old form works. `ANNOUNCED` lists the changes that were.
"""

import json
import shutil
from itertools import zip_longest
from pathlib import Path

import pytest
from support.golden_release import BY_NAME, FOLDER, losses, parameters_of, public_names, values_of, version

RELEASES = sorted(folder.name for folder in FOLDER.iterdir())
ANNOUNCED: set[str] = set()
"""Settings and `module:name` whose change docs/api.md has announced."""


def changed_parameters(old: list[str] | None, new: list[str] | None) -> list[str]:
    """Returns the old parameters that a caller can no longer give by name and position, or whose default differs."""
    if old is None:
        return []
    if new is None:
        return old
    accepted = {each.removeprefix(BY_NAME) for each in new}
    by_position = [each for each in old if not each.startswith(BY_NAME)]
    moved = {each for each, now in zip_longest(by_position, new[: len(by_position)]) if each != now}
    return [each for each in old if each in moved or each.removeprefix(BY_NAME) not in accepted]


@pytest.mark.parametrize("release", RELEASES)
def test_its_checkpoint_resumes(release: str, tmp_path: Path) -> None:
    folder = FOLDER / release
    wanted = json.loads((folder / "release.json").read_text())["losses"]
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    data = f"--data-path {folder / 'documents'} --data-cache-path {tmp_path / 'cache'}"
    found = losses(f"{(folder / 'run.txt').read_text()} {data} --load {tmp_path / 'checkpoint'}")
    # float64: sums in another order differ by 1e-15 each, and six steps of training do not enlarge that a thousandfold.
    assert found == pytest.approx(wanted[-len(found) :], rel=1e-11) and len(found) == 3


@pytest.mark.parametrize("release", RELEASES)
def test_it_trains_as_it_did(release: str, tmp_path: Path) -> None:
    folder = FOLDER / release
    wanted = json.loads((folder / "release.json").read_text())["losses"]
    data = f"--data-path {folder / 'documents'} --data-cache-path {tmp_path}"
    assert losses(f"{(folder / 'run.txt').read_text()} {data}") == pytest.approx(wanted, rel=1e-11)


@pytest.mark.parametrize("release", RELEASES)
def test_its_settings_keep_their_values(release: str) -> None:
    folder = FOLDER / release
    wanted = json.loads((folder / "release.json").read_text())["values"]
    found = values_of(f"{(folder / 'run.txt').read_text()} --mock-data")
    changed = {name: (value, found.get(name)) for name, value in wanted.items() if found.get(name) != value}
    assert not changed.keys() - ANNOUNCED, "announce it in docs/api.md: (value before, value now)"


@pytest.mark.parametrize("release", RELEASES)
def test_its_public_names_keep_their_parameters(release: str) -> None:
    wanted = json.loads((FOLDER / release / "release.json").read_text())["names"]
    found = public_names()
    changed = {name: changed_parameters(old, found.get(name)) for name, old in wanted.items()}
    assert not {name for name, gone in changed.items() if gone or name not in found} - ANNOUNCED


def test_what_counts_as_a_change() -> None:
    def before(a, b=1, *, c=None): ...

    def renamed(x, b=1, *, c=None): ...

    def moved(b=1, a=None, *, c=None): ...

    def longer(a, b=1, d=(), *, c=None, e=2): ...

    old = parameters_of(before)
    assert old == ["a", "b = 1", "*, c = None"] and not changed_parameters(old, old)
    assert changed_parameters(old, parameters_of(renamed)) == ["a"]
    assert set(changed_parameters(old, parameters_of(moved))) == {"a", "b = 1"}
    assert changed_parameters(old, parameters_of(longer)) == []
    assert changed_parameters(old, None) == old


def test_this_version_has_its_folder_and_it_is_small() -> None:
    assert version() in RELEASES
    for release in RELEASES:
        assert sum(file.stat().st_size for file in (FOLDER / release).rglob("*") if file.is_file()) < 300_000
