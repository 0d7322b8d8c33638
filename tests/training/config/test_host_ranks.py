"""Ranks of a host, from the variables of each launcher."""

import pytest

from megatron.training.config.host_ranks import ranks_of_host

STEP = {"WORLD_SIZE": "12", "SLURM_NTASKS": "12", "SLURM_TASKS_PER_NODE": "8,4"}


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "x"}, None),
        ({"LOCAL_WORLD_SIZE": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "6"}, 6),
        (STEP, 8),
        ({**STEP, "SLURM_NODEID": "1"}, 4),
        ({**STEP, "SLURM_NODEID": "2"}, None),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "6(x2)"}, 6),
        # A dry run of another size within a job, and torchrun on each node.
        ({**STEP, "WORLD_SIZE": "64"}, None),
        ({**STEP, "WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "32"}, 32),
    ],
)
def test_ranks_of_a_host(variables: dict[str, str], ranks: int | None) -> None:
    assert ranks_of_host(variables) == ranks
