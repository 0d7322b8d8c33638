"""Runs with optimizer state or weights in files: the same losses, also after a kill in the middle of an update."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.programs import commands
from support.runs import TINY, differences, state_at_end, state_at_start, train_all_on_ranks, train_on_ranks

ROOT = Path(__file__).parents[2]
OFFLOAD = "--optimizer-cpu-offload --optimizer-nvme-offload-path"
ZERO_3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
WEIGHTS = "--param-nvme-offload-path"
SCRIPT = """
import os, signal, sys
from megatron.core.optimizer import host_state
from megatron.facades.pretrain import pretrain
from support.runs import GPT

host_state.PIECE, write, left = 1 << 10, os.pwritev, int(os.environ.get("WRITES_BEFORE_THE_KILL", "-1"))

def writing(*arguments):
    global left
    left -= 1
    if left == 0 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)

os.pwritev = writing
if __name__ == "__main__":
    pretrain(GPT)
"""


def train(folder: Path, flags: str, **environment: str) -> tuple[int, str, dict[int, float]]:
    """Returns the exit code of torchrun, what it printed, and the losses by step."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    metrics = folder / "metrics.jsonl"
    words = f"{TINY} --mock-data --bf16 --use-distributed-optimizer --log-interval 1 --metrics-path {metrics} {flags}"
    run = subprocess.run(
        [commands() / "torchrun", "--standalone", "--nproc-per-node", "2", "script.py", *words.split()],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = {line["iteration"]: line["lm loss"] for line in lines if "lm loss" in line}
    return run.returncode, run.stdout + run.stderr, losses


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "offload", "writes"), [("", OFFLOAD, 290), (ZERO_3, WEIGHTS, 23)])
def test_a_kill_in_the_middle_of_an_update_loses_nothing(
    layout: str, offload: str, writes: int, tmp_path: Path
) -> None:
    """A step writes four shards of weights, and many pieces of state."""
    disk = tmp_path / "disk"
    disk.mkdir()
    code, said, plain = train(tmp_path / "plain", f"--train-iters 6 {layout}")
    assert code == 0, said
    saves = f"{layout} {offload} {disk} --train-iters 6 --save {tmp_path}/saved --load {tmp_path}/saved"
    code, said, losses = train(tmp_path / "run", f"{saves} --save-interval 3", WRITES_BEFORE_THE_KILL=str(writes))
    assert code != 0 and losses.keys() >= {1, 2, 3} and 6 not in losses, said
    assert losses == {step: plain[step] for step in losses}
    assert [path.name for path in disk.iterdir()], "a killed process leaves its file"
    resume = f"--train-iters 6 {layout} --load {tmp_path}/saved"
    for name, flags in (("in_file", f"{resume} {offload} {disk}"), ("elsewhere", resume)):
        code, said, losses = train(tmp_path / name, flags)
        assert code == 0 and losses == {step: plain[step] for step in (4, 5, 6)}, said
        assert not list(disk.iterdir()), "files of the killed run and of this one are removed"


def test_runs_with_weights_in_a_file_are_equal_to_the_bit(tmp_path: Path) -> None:
    """With evaluations, norms of weights, checkpoints, and state in a file of the same folder."""
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    flags = f"--mock-data --bf16 --train-iters 4 --eval-interval 2 --eval-iters 1 {ZERO_3} --log-params-norm"
    in_file = f"{flags} {WEIGHTS} {disk}"
    both = f"{in_file} {OFFLOAD} {disk} --overlap-param-gather --overlap-grad-reduce"
    plain, one, two = zip(*train_all_on_ranks([flags, f"{in_file} --save {saved}", both], 2), strict=True)
    assert len(plain[0].losses) == 4 and len(plain[0].validations) == 3
    for ranks in (one, two):
        assert [rank.losses for rank in ranks] == [rank.losses for rank in plain]
        assert [[each.losses for each in rank.validations] for rank in ranks] == [
            [each.losses for each in rank.validations] for rank in plain
        ]
        assert [step.params_norm for step in ranks[0].steps] == [step.params_norm for step in plain[0].steps]
        for mine, other in zip(ranks, plain, strict=True):
            assert differences(mine.at_end, other.at_end) == []
    flags = f"--mock-data --bf16 --train-iters 4 --eval-iters 0 --load {saved}"
    loaded = state_at_start(train_on_ranks(f"{flags} --tensor-model-parallel-size 2", 2))
    expected = state_at_end(plain)
    assert loaded.keys() == expected.keys()
    assert all(loaded[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_a_missing_folder_is_one_message(tmp_path: Path) -> None:
    code, said, _ = train(tmp_path / "run", f"{OFFLOAD} {tmp_path}/none --train-iters 1")
    told = f": --optimizer-nvme-offload-path {tmp_path}/none: there is no such folder: make it on a local disk"
    assert code != 0 and f"\nerror on rank 0{told}" in said, said
