"""Starts the ranks of a host again and again, from one process that has imported everything: `tools/launch.py
--nproc-per-node N`. A fork takes milliseconds, where a new Python takes seconds to import torch.

python -m megatron.training.launch.nursery FD

FD is a socket, on which lines of JSON arrive and are answered: {"script": "pretrain_gpt.py", "arguments": [...],
"ranks": 4, "port": 29500} by {"pids": [...]} once they are started, and by {"code": 0} once all have ended: 0, or the
code of the first one that failed. The process ends, and its ranks with it, when the other end of the socket is closed.
It starts no thread and does not touch a GPU, since a child could use neither.
"""

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

PATIENCE = 30.0
"""Seconds that the other ranks have to end after one has failed. They end by themselves, by heartbeats."""

_IMPORTED = ("torch", "numpy", "megatron.facades.pretrain", "megatron.facades.script_providers")
_PR_SET_PDEATHSIG = 1


def serve(channel: socket.socket) -> Sequence[str] | None:
    """Answers requests. Returns the words of the command line of a rank, in that rank; None at the end of the requests
    in this process."""
    lines = channel.makefile("r", encoding="utf-8")
    for line in lines:
        request = json.loads(line)
        pids = list[int]()
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                channel.detach()
                _become(rank, request["ranks"], request["port"])
                return [request["script"], *request["arguments"]]
            pids.append(pid)
        _send(channel, {"pids": pids})
        code = _wait(channel, pids)
        if code is None:
            return None
        _send(channel, {"code": code})
    return None


def _send(channel: socket.socket, answer: Mapping[str, object]) -> None:
    channel.sendall(json.dumps(answer).encode() + b"\n")


def _become(rank: int, ranks: int, port: int) -> None:
    """Makes this process a rank: variables as torchrun sets them, and an end when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _wait(channel: socket.socket, pids: Sequence[int]) -> int | None:
    """Waits until all processes have ended, and returns the code of the first that failed, or 0. None, after killing
    them, if the other end of the channel is gone."""
    left, code, deadline = set(pids), 0, float("inf")
    while left:
        for pid in sorted(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                ended = os.waitstatus_to_exitcode(status)
                if ended and not code:
                    code, deadline = 128 - ended if ended < 0 else ended, time.monotonic() + PATIENCE
        gone = bool(select.select([channel], [], [], 0.05 if left else 0.0)[0]) and not channel.recv(1, socket.MSG_PEEK)
        if gone or time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            if gone:
                return None
    return code


def main() -> None:
    """Imports what ranks need, and serves. In a rank it runs the script."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # otherwise a look for GPUs would begin to use one
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # they are for the ranks; the tool passes them on
    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in _IMPORTED:
        importlib.import_module(module)
    command = serve(channel)
    if command is None:
        return
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = list(command)
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
