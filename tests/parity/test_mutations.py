"""Each known bug, planted in a copy of the product, makes the named parity cell fail.

The bug does not change one process, all numbers stay finite and the loss falls, so nothing else would show it.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from parity.cells import cell_of, quick_cells
from parity.mutated import mean_losses
from parity.mutations import MUTATIONS, Mutation
from parity.reference import reference
from support.each import for_each
from support.programs import python

ROOT = Path(__file__).parents[2]


def plant(mutation: Mutation, folder: Path) -> None:
    """Creates a copy of the package in `folder` with the bug: links to all files but the changed one."""
    shutil.copytree(ROOT / "megatron", folder / "megatron", copy_function=os.symlink)
    (folder / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    file = folder / "megatron" / mutation.file
    source = file.read_text()
    assert source.count(mutation.before) == 1, f"{mutation.name} applies {source.count(mutation.before)} times"
    file.unlink()
    file.write_text(source.replace(mutation.before, mutation.after))


def examine(mutation: Mutation, folder: Path) -> dict[str, Any]:
    """Plants the bug, runs the cell in a new process, and returns the JSON object that `parity.mutated` prints."""
    plant(mutation, folder)
    paths = f"{folder}:{ROOT / 'tests'}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python(fresh=True), "-m", "parity.mutated", mutation.caught_by]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=500)
    assert done.returncode == 0, (
        f"{mutation.name} makes the program fail, so it is no hidden bug:\n{done.stderr[-4000:]}"
    )
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert seen["product"] and all(Path(file).is_relative_to(folder) for file in seen["product"])
    return seen


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(m, id=m.name, marks=[] if m.quick else [pytest.mark.slow]) for m in MUTATIONS],
)
def test_a_planted_bug_is_caught(mutation: Mutation, tmp_path: Path) -> None:
    seen = examine(mutation, tmp_path)
    cell = cell_of(mutation.caught_by)
    # One process computes the same with the bug as without.
    expected = reference(cell.model, cell.per_token, cell.model.steps, cell.rows, layers=cell.layers)
    assert not seen["one process"]
    assert seen["norms of one process"] == pytest.approx([step.norm for step in expected.steps], rel=1e-11)
    assert seen["losses of one process"] == pytest.approx(mean_losses([expected]), rel=1e-11)
    # In the layout nothing looks wrong: numbers are finite and the loss falls.
    assert seen["finite"]
    assert seen["losses"][-1] < seen["losses"][0]
    # The named cell notices the bug, in the number of steps of its test.
    assert seen["differences"]


def test_at_least_twenty_bugs_all_different() -> None:
    assert len(MUTATIONS) >= 20
    assert len({(m.file, m.before, m.after) for m in MUTATIONS}) == len(MUTATIONS) == len({m.name for m in MUTATIONS})


@for_each(MUTATIONS, lambda mutation: mutation.name)
def test_each_bug_applies_exactly_once(mutation: Mutation) -> None:
    assert (ROOT / "megatron" / mutation.file).read_text().count(mutation.before) == 1
    assert mutation.before != mutation.after
    assert cell_of(mutation.caught_by) in quick_cells()
