"""Groups of ranks across nodes are refused or named before a run starts."""

import os
import re
import sys
from pathlib import Path

import pytest
from support.command_lines import SMALL
from support.launch import launch
from support.runs import GPT

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.topology import topology_lines
from megatron.training import pretrain
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.launcher_variables import take_ranks_of_launcher

SIXTEEN = f"{SMALL} --hidden-size 128 --num-attention-heads 16 --global-batch-size 64 --bf16 "
TENSOR_16 = "--tensor-model-parallel-size 16"
EXPERTS = (
    "--num-experts 64 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-topk 2 "
    "--moe-ffn-hidden-size 64 --expert-model-parallel-size "
)
OF_LAUNCHERS = {
    "torchrun": {"WORLD_SIZE": "16", "RANK": "0", "LOCAL_WORLD_SIZE": "8"},
    "srun": {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "gpu[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    },
    "srun, ranks set by hand": {
        "WORLD_SIZE": "16",
        "RANK": "9",
        "SLURM_NTASKS": "16",
        "SLURM_NODEID": "1",
        "SLURM_TASKS_PER_NODE": "8(x2)",
    },
    "mpirun": {
        "OMPI_COMM_WORLD_SIZE": "16",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
    },
    "another MPI": {
        "PMI_SIZE": "16",
        "PMI_RANK": "0",
        "MPI_LOCALNRANKS": "8",
        "MPI_LOCALRANKID": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    },
}
NAMES = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def problems(flags: str, ranks: int = 16, node: int | None = 8) -> str:
    """Returns the errors of a command line, and "" if there are none."""
    try:
        configure(f"{SIXTEEN} {flags}".split(), launch_environment=LaunchEnvironment(ranks, True, ranks_of_host=node))
    except UserError as error:
        return str(error)
    return ""


def lines(flags: str, ranks: int = 16, node: int | None = 8) -> str:
    """Returns the warnings of a command line."""
    launched = LaunchEnvironment(ranks, True, ranks_of_host=node)
    return "\n".join(topology_lines(configure(f"{SIXTEEN} {flags}".split(), launch_environment=launched), launched))


@pytest.mark.parametrize("launcher", OF_LAUNCHERS)
def test_every_launcher_tells_the_ranks_of_a_node(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "MPI_", "PMIX_")) or name in NAMES:
            monkeypatch.delenv(name)
    for name, value in OF_LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    take_ranks_of_launcher()
    added = [name for name in NAMES if name in os.environ]
    try:
        with pytest.raises(
            UserError, match=r"--tensor-model-parallel-size 16: .*several nodes, because the launcher starts 8 on"
        ):
            configure(f"{SIXTEEN} {TENSOR_16}".split())
        assert configure(f"{SIXTEEN} --tensor-model-parallel-size 8".split()).world_size == 16
    finally:
        for name in added:
            os.environ.pop(name, None)


@pytest.mark.parametrize(
    ("flags", "node", "message"),
    [
        (TENSOR_16, 8, "because the launcher starts 8 on each node .* network; use 8, or give --allow-tensor"),
        ("--tensor-model-parallel-size 8", 4, "the launcher starts 4 on each node .*use 4, or"),
        ("--tensor-model-parallel-size 4", 6, "the launcher starts 6 on each node .*use 3 or 6, or"),
        (f"{TENSOR_16} --gpus-per-nvlink-domain 8", None, "because --gpus-per-nvlink-domain is 8, and"),
        (f"{TENSOR_16} --gpus-per-node 4 --dry-run", None, "because --gpus-per-node is 4, and"),
        (
            f"{EXPERTS} 1 {TENSOR_16} --expert-tensor-parallel-size 16 --sequence-parallel",
            8,
            "--expert-tensor-parallel",
        ),
        ("--gpus-per-node 8", 4, "--gpus-per-node 8: the launcher has started 4 of the 16 ranks on this host; start 8"),
    ],
)
def test_slow_groups_are_refused(flags: str, node: int | None, message: str) -> None:
    assert re.search(message, problems(flags, node=node)), problems(flags, node=node)


@pytest.mark.parametrize(
    ("flags", "ranks", "node"),
    [
        (TENSOR_16, 16, 16),
        (TENSOR_16, 16, None),
        (f"{TENSOR_16} --allow-tensor-parallel-across-nodes", 16, 8),
        (f"{TENSOR_16} --gpus-per-nvlink-domain 32", 16, 8),
        (f"{TENSOR_16} --gpus-per-node 16 --dry-run", 16, 8),
        ("--tensor-model-parallel-size 4", 16, 8),
        ("--tensor-model-parallel-size 2", 2, 8),
    ],
)
def test_other_groups_are_not(flags: str, ranks: int, node: int | None) -> None:
    assert problems(flags, ranks, node) == ""


def test_without_a_size_of_nodes_a_line_says_so() -> None:
    assert lines(TENSOR_16, node=None).startswith("topology: the number of GPUs of a node is not known")
    assert lines("", node=None) == ""


def test_experts_across_nodes_are_named_with_their_bytes() -> None:
    found = lines(f"{EXPERTS} 16 --expert-tensor-parallel-size 1")
    # 2 samples of 128 tokens with 128 channels in bf16, 2 experts, 15 of 16 to others and 8 of 15 of these to the other
    # node; there and back, forward and backward, of 2 layers in 2 micro-batches
    sent = 2 * 128 * 128 * 2 * 2 * 15 / 16 * 8 / 15 * 4 * 2 * 2
    assert "--expert-model-parallel-size 16: ranks of one group are on several nodes, where 8 GPUs" in found
    assert f"each GPU sends about {sent / 1e9:,.3g} GB over the network in a step" in found
    assert "--expert-model-parallel-size" not in lines(f"{EXPERTS} 8 --expert-tensor-parallel-size 1")


def test_sequences_across_nodes_are_named_with_their_bytes() -> None:
    found = lines("--context-parallel-size 16")
    # keys and values of 16 tokens, of 128 channels each in bf16, for 2 layers in 32 micro-batches, 15 times
    sent = 3 * 2 * 16 * 2 * 128 * 2 * 15 * 32
    assert f"the last GPU of each node sends about {sent / 1e9:,.3g} GB over the network in a step" in found, found
    assert lines("--context-parallel-size 16 --cp-comm-type all_gather") == found
    assert lines("--context-parallel-size 8") == ""


def test_large_bubbles_are_named() -> None:
    flags = "--num-layers 8 --pipeline-model-parallel-size 8 --micro-batch-size 2"
    assert "with 16 micro-batches of each rank, ranks wait 30% of the time" in lines(flags)  # 7 / (16 + 7)
    assert lines(f"{flags} --global-batch-size 256") == ""


def _on_a_node_of_one() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    pretrain(GPT)


def test_the_launch_ends_before_a_process_group_starts(tmp_path: Path) -> None:
    program = launch("--mock-data --train-iters 1 --tensor-model-parallel-size 2", 2, tmp_path, _on_a_node_of_one)
    assert program.exit_codes() == [2, 2]
    assert program.output(0).startswith("error: --tensor-model-parallel-size 2: ranks of one group would be on several")
    assert "process group" not in program.output(0) and program.output(1) == ""


def test_a_run_says_its_warnings_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{SIXTEEN} --num-layers 8 --pipeline-model-parallel-size 8 --dry-run"
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words.split()])
    pretrain(GPT)
    assert capfd.readouterr().out.count("topology: ") == 1
