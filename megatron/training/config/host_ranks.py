"""The number of ranks on this host, from the variables of the launcher."""

import re
from collections.abc import Mapping


def ranks_of_host(environ: Mapping[str, str]) -> int | None:
    """Returns the number of ranks on this host, from the variables of torchrun, Open MPI, another MPI or SLURM; None if
    they do not say. The job script of SLURM, which is one process, gets the number of tasks of its node."""
    found = [environ.get(name) for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")]
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    if "WORLD_SIZE" in environ and environ["WORLD_SIZE"] == environ.get("SLURM_NTASKS"):
        found.append(tasks_of_node(tasks, environ.get("SLURM_NODEID", "0")))
    return next((int(count) for count in found if count is not None and count.isdecimal() and int(count) > 0), None)


def tasks_of_node(text: str, node: str) -> str | None:
    """Returns the number of tasks of a node from SLURM's list of all nodes, such as 8(x3),4; None if it does not
    say."""
    counts: list[str] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [tasks] * int(times or 1)
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None
