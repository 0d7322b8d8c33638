"""Lightning's own Trainer runs a MegatronStrategy."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.facades.nemo.lightning.launcher import RunLauncher

TESTS = Path(__file__).parents[3]


def printed(words: list[str], folder: Path) -> str:
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.slow
def test_lightnings_own_trainer_runs_the_strategy(tmp_path: Path) -> None:
    assert printed(["support.lightning_runs", str(tmp_path / "checkpoints")], tmp_path).endswith("all runs agree\n")


@pytest.mark.slow
def test_lightnings_own_trainer_runs_several_ranks_and_stages(tmp_path: Path) -> None:
    """The second stage starts the ranks anew, in torchrun's store of the first."""
    losses = []
    for ranks in ("1", "2"):
        torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", ranks, "-m", "support.lightning_runs"]
        found = re.search(r"^losses (\S+) (\S+)$", printed(torchrun, tmp_path), re.MULTILINE)
        assert found is not None
        losses.append([*map(float, found.groups())])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_stage_that_does_not_exist_here_is_refused() -> None:
    def _predict_impl(model: Any, datamodule: Any = None, ckpt_path: Any = None) -> None: ...

    with pytest.raises(UserError, match=r"trainer\.predict: not yet; fit, validate and test work"):
        RunLauncher().launch(_predict_impl, None, None, None, trainer=SimpleNamespace())
