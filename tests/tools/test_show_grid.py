"""tools/show_grid.py: groups and communicators, counted by hand and for sixteen thousand ranks."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.groups.rank_grid import RankGrid
from tools.show_grid import all_groups, communicators, communicators_of_ranks, main

SIXTEEN_THOUSAND = [
    "--world-size", "16384", "--tensor-model-parallel-size", "8", "--context-parallel-size", "2",
    "--pipeline-model-parallel-size", "16", "--expert-model-parallel-size", "64", "--expert-tensor-parallel-size", "1",
]  # fmt: skip


def test_communicators_of_a_small_world() -> None:
    """TP 2 x PP 2 x DP 2: tp, pp, dp, and the three products of two of them; equal sets of ranks count once."""
    grid = RankGrid(8, tensor=2, pipeline=2)
    made = communicators(grid, all_groups(grid))
    expected = set(itertools.chain(grid.groups(["tp"]), grid.groups(["pp"]), grid.groups(["dp"])))
    expected |= set(itertools.chain(grid.groups(["tp", "pp"]), grid.groups(["tp", "dp"])))
    assert made == expected  # nobody needs dp x pp
    assert set(communicators_of_ranks(grid, all_groups(grid)).values()) == {5}
    assert communicators(RankGrid(8), all_groups(RankGrid(8))) == set()  # all is the world


def test_levels_of_hierarchical_context_parallelism() -> None:
    groups = all_groups(RankGrid(16, context=8, tensor=2), [2, 4])
    assert groups["hcp[0]"][0] == (0, 2) and groups["hcp[1]"][0] == (0, 4, 8, 12)


def test_sixteen_thousand_ranks_on_a_cpu_without_torch() -> None:
    code = "import sys; from tools.show_grid import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *SIXTEEN_THOUSAND],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("16,384 ranks, order tp-cp-ep-dp-pp: tp 8, cp 2, dp 64, pp 16, etp 1, ep 64, edp 16")
    assert lines[-1] == "66,753 groups, 15,168 communicators, 12 to 13 per rank besides that of all ranks"


def test_one_rank_and_sizes_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world-size", "8", "--tensor-model-parallel-size", "2", "--rank", "5"]) == 0
    assert "tp               4, 5\n" in capsys.readouterr().out
    assert main(["--world-size", "8", "--tensor-model-parallel-size", "3"]) == 2
    assert "does not divide the 8 ranks" in capsys.readouterr().err
    assert main(["--world-size", "8", "--rank", "8"]) == 2
