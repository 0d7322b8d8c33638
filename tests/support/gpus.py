"""How many ranks of one world the GPUs of this machine can hold.

NCCL wants a GPU for each rank. From release 2.30 on it also lets ranks share a GPU, if the environment has
NCCL_MULTI_RANK_GPU_ENABLE=1: then cells of four ranks run on one GPU, slowly, because its processes take turns.

`torchrun gpus.py SCRIPT` runs a script that takes the GPU of its local rank, which may be shared.
"""

import os
import runpy
import sys

import pytest
import torch

from megatron.core.utils.rendezvous import ranks_may_share_gpus

PRESENT = torch.cuda.device_count()
ROOM = max(4, PRESENT) if PRESENT and ranks_may_share_gpus() else PRESENT
"""Number of ranks that can be on this machine's GPUs."""

if ROOM > PRESENT:
    # The same permission for torch's symmetric memory.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def need_room(ranks: int) -> None:
    """Skips the test if the GPUs cannot hold so many ranks."""
    if ranks > ROOM:
        pytest.skip(f"needs {ranks} GPUs, {PRESENT} are here")


two_ranks = pytest.mark.skipif(ROOM < 2, reason=f"needs two GPUs, {PRESENT} are here")
"""Marks tests of two ranks."""


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = str(int(os.environ.get("LOCAL_RANK", "0")) % max(1, PRESENT))
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
