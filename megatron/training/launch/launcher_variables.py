"""Takes a process's rank from SLURM, Open MPI or another MPI (PMI), if torchrun has not set it.

`srun python pretrain_gpt.py` starts several processes that know each other only by the variables of their launcher.
Without torchrun's variables each would train a model of its own, and write into the same folder.
"""

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping, Sequence

from megatron.core.exceptions import UserError
from megatron.training.config.settings import tasks_of_node

_WAYS_OUT = (
    "start the run with torchrun on each node, or with examples/train.slurm, which sets these variables; to train with "
    "one process, set WORLD_SIZE=1"
)
_LARGEST_STEP = 0xFFFF_0000
"""Numbers above are steps of SLURM that are no step of srun: the batch script, or a shell of salloc."""


def take_ranks_of_launcher(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) from those
    of mpirun or srun. Does nothing if RANK or WORLD_SIZE is set, or if no launcher has started several processes. A
    batch script of SLURM is one process, for any number of tasks. Raises UserError if the number of processes is
    known and the rest is not."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return
    found = _of_open_mpi(environ) or _of_pmi(environ) or _of_slurm(environ)
    if found is None or found["WORLD_SIZE"] == "1":
        return
    for name, value in found.items():
        if value is not None:
            environ.setdefault(name, value)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        launcher = _launcher(environ)
        raise UserError(
            f"{launcher} has started {found['WORLD_SIZE']} processes, but does not say {' and '.join(missing)}; set "
            "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there (mpirun -x MASTER_ADDR=HOST -x "
            f"MASTER_PORT=29500), or {_WAYS_OUT}"
        )


_Found = dict[str, str | None]


def _launcher(environ: Mapping[str, str]) -> str:
    names = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "an MPI launcher"}
    return next((launcher for name, launcher in names.items() if name in environ), "srun")


def _of_open_mpi(environ: Mapping[str, str]) -> _Found | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    ranks, local = environ["OMPI_COMM_WORLD_SIZE"], environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    run = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return {
        "RANK": environ.get("OMPI_COMM_WORLD_RANK"),
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": environ.get("OMPI_COMM_WORLD_LOCAL_RANK"),
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "127.0.0.1" if local == ranks else None,
        "MASTER_PORT": _port(zlib.crc32(run.encode())),
    }


def _of_pmi(environ: Mapping[str, str]) -> _Found | None:
    same_as_slurm = environ.get("PMI_RANK") == environ.get("SLURM_PROCID") and "SLURM_STEP_ID" in environ
    if "PMI_SIZE" not in environ or same_as_slurm:  # srun --mpi=pmi2: SLURM tells more
        return None
    ranks, local = environ["PMI_SIZE"], environ.get("MPI_LOCALNRANKS")
    return {
        "RANK": environ.get("PMI_RANK"),
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": environ.get("MPI_LOCALRANKID"),
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "127.0.0.1" if local == ranks else None,
        "MASTER_PORT": "29500" if local == ranks else None,
    }


def _of_slurm(environ: Mapping[str, str]) -> _Found | None:
    ranks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")
    if ranks is None or not _is_task_of_step(environ):
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    count = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or environ.get("SLURM_JOB_NUM_NODES")
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    number = (int(job) if job.isdecimal() else 0) * 31 + (int(step) if step.isdecimal() else 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": ranks,
        # with --gpus-per-task each process sees only its own GPU
        "LOCAL_RANK": "0" if _sees_one_gpu(environ) else environ.get("SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": tasks_of_node(tasks, environ.get("SLURM_NODEID", "0")),
        "MASTER_ADDR": "127.0.0.1" if count == "1" else first_host(nodes or ""),
        "MASTER_PORT": _port(number),
    }


def _is_task_of_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process, and not the batch script of a job, whose only process has SLURM_PROCID 0
    as well. A container may pass only a few variables on."""
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    if step is not None:
        return step.isdecimal() and int(step) < _LARGEST_STEP
    of_batch_script = environ.get("ENVIRONMENT") == "BATCH" or "SLURM_TASK_PID" in environ or "SLURM_GTIDS" in environ
    return environ["SLURM_PROCID"] != "0" or not of_batch_script


def _sees_one_gpu(environ: Mapping[str, str]) -> bool:
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return "SLURM_GPUS_PER_TASK" in environ and visible != "" and "," not in visible


def _port(number: int) -> str:
    """Returns a port for a job, below those that systems give to connections."""
    return str(12_000 + number % 20_000)


def first_host(nodes: str) -> str | None:
    """Returns the first host of SLURM's list: node[007-010,012],other3 -> node007; None for an empty list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first[0]) if first else None


def processes_of(launcher: Sequence[str]) -> int:
    """Returns the number of processes that the words of a launcher start. Raises UserError if it is no number."""
    count = 1
    for place, word in enumerate(launcher):
        name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
        if name in ("nproc-per-node", "nnodes"):
            value = value if equals else launcher[place + 1]
            if not value.isdigit():
                raise UserError(f"{word} {value}: give the number of processes as a number")
            count *= int(value)
    return count
