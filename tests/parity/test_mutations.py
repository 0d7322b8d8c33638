"""The tests of layouts are worth something: each known bug, planted in the product, makes the named one fail.

A planted bug leaves one process right, keeps everything finite and lets the loss fall: nobody would see it otherwise.
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
from support.programs import python

ROOT = Path(__file__).parents[2]


def plant(mutation: Mutation, folder: Path) -> None:
    """A copy of the product with the bug in it: links to all of its files but one."""
    shutil.copytree(ROOT / "megatron", folder / "megatron", copy_function=os.symlink)
    (folder / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    file = folder / "megatron" / mutation.file
    source = file.read_text()
    assert source.count(mutation.before) == 1, f"{mutation.name} applies {source.count(mutation.before)} times"
    file.unlink()
    file.write_text(source.replace(mutation.before, mutation.after))


def examine(mutation: Mutation, folder: Path) -> dict[str, Any]:
    """What the changed product computes."""
    plant(mutation, folder)
    paths = f"{folder}:{ROOT / 'tests'}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python(fresh=True), "-m", "parity.mutated", mutation.caught_by]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=500)
    assert done.returncode == 0, f"{mutation.name} breaks the program, which everybody sees:\n{done.stderr[-4000:]}"
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
    # The changed product, in one process, computes what the product computes.
    expected = reference(cell.model, cell.per_token, cell.model.steps)
    assert not seen["one process"]
    assert seen["norms of one process"] == pytest.approx([step.norm for step in expected.steps], rel=1e-11)
    assert seen["losses of one process"] == pytest.approx(mean_losses([expected]), rel=1e-11)
    # In the layout nothing looks wrong by itself.
    assert seen["finite"]
    assert seen["losses"][-1] < seen["losses"][0]
    # And the named test sees it, in as many steps as it takes.
    assert seen["differences"]


def test_there_are_twenty_and_each_is_another() -> None:
    assert len(MUTATIONS) >= 20
    assert len({(m.file, m.before, m.after) for m in MUTATIONS}) == len(MUTATIONS) == len({m.name for m in MUTATIONS})


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_applies_exactly_once(mutation: Mutation) -> None:
    assert (ROOT / "megatron" / mutation.file).read_text().count(mutation.before) == 1
    assert mutation.before != mutation.after
    assert cell_of(mutation.caught_by) in quick_cells()
