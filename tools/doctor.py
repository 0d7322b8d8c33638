"""Examines the machines of a run before it starts: versions, limits, disks, network, GPUs.

python tools/doctor.py --folder checkpoints
torchrun --nproc_per_node 8 tools/doctor.py
srun python tools/doctor.py --measure gpu.toml

Under torchrun, srun or mpirun it compares the ranks, and names what differs. --measure also measures products,
attention, copies and links, names slow GPUs and links, and writes a record for the planner's --gpu.

Exit code 0: all is well; 1: warnings, with which a run starts (under a launcher 0, so that they do not look like a
failure); 2: faults, or a wrong command line. The last line has the verdict.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch.distributed as dist

from megatron.core.exceptions import UserError
from megatron.core.utils.world_store import StartFailed
from megatron.diagnosis.doctor.examination import examine
from megatron.diagnosis.doctor.report import report_lines
from megatron.training.config.tool_flags import ToolParser, number
from megatron.training.launch.errors import exit_with_problems, write_launcher_error_file


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    try:
        args = _parser().parse_args(argv)
        found = examine(args.folder, args.measure is not None, args.measure, args.wait)
    except UserError as error:
        exit_with_problems(error)
    except StartFailed as error:
        print(f"fault: {error}", file=sys.stderr, flush=True)
        return 2
    if os.environ.get("RANK", "0") == "0":
        lines = list(report_lines(found))
        print(*lines, sep="\n", flush=True)
        if found.exit_code == 2:
            write_launcher_error_file(lines[-1])
    if dist.is_initialized():
        dist.barrier()  # the first rank has printed before torchrun ends it
        dist.destroy_process_group()
    return 0 if found.exit_code == 1 and "RANK" in os.environ else found.exit_code


def _parser() -> ToolParser:
    parser = ToolParser(prog="doctor.py", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="FOLDER", help="where a run would save (default: this folder)"
    )
    parser.add_argument(
        "--measure",
        type=Path,
        nargs="?",
        const=Path("measured_gpu.toml"),
        metavar="FILE",
        help="measure rates, and write them to FILE (default: measured_gpu.toml)",
    )
    parser.add_argument(
        "--wait",
        type=number(1, 3600, "60"),
        default=60.0,
        metavar="SECONDS",
        help="time in which all ranks must have started (default: 60)",
    )
    return parser


if __name__ == "__main__":
    run_main(main)
