"""Runs Python programs as forks of a process that has imported everything: `python script.py` in 0.1 s, not 3 s.

`commands()` returns a folder with a `python` and a `torchrun` that a test calls like the real ones: with
subprocess, or in bash with the folder first on PATH. They hand their arguments, working directory, environment and open
files to a server, which forks a process that becomes the program (`support.become`). Signals to the command reach the
program, and the command ends as the program does.

One thing differs from the real interpreter: modules are imported already, so a missing import may not be noticed.
`tests/tools/test_programs.py` runs every tool with its own imports. Do not use this for tests of memory, of import
times, or of environment variables that a module reads at import.
"""

import atexit
import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from support import become
from support.forkserver import forkserver, start_server

_COMMAND = '''#!{python} -IS
"""Hands a program to the server of tests/support/programs.py."""
import json, os, select, signal, socket, sys

if sys.argv[1:2] and sys.argv[1][0] == "-" and sys.argv[1] not in ("-", "-c", "-m", "-u") and not {words}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
program, early = 0, []
wake, wakes = os.pipe()
os.set_blocking(wakes, False)
signal.set_wakeup_fd(wakes)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.kill(program, number) if program else early.append(number))
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    words = {words} + sys.argv[1:]
    request = {{"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "group": os.getpgrp()}}
    request["fresh"] = {fresh}
    socket.send_fds(server, [b"x"], [0, 1, 2])
    server.sendall(json.dumps(request).encode() + b"\\n")
    answers = server.makefile()
    program = int(answers.readline())
    for number in early:
        os.kill(program, number)
    # Python runs no handler of a signal that comes just before a read blocks; `wake` ends `select` then too.
    while server not in select.select([server, wake], [], [])[0]:
        os.read(wake, 4096)
    code = int(answers.readline() or 70)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
'''


_FRESH = "python-fresh"


@cache
def commands() -> Path:
    """Returns the folder with `python` and `torchrun`. The first call starts the server; it ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="programs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = str(folder / "socket")
    for name in ("python", "python3", _FRESH, "torchrun"):
        words = ["-m", "torch.distributed.run"] if name == "torchrun" else []
        file = folder / name
        file.write_text(_COMMAND.format(python=sys.executable, address=address, words=words, fresh=name == _FRESH))
        file.chmod(0o755)
    ready, listening = forkserver.Pipe(duplex=False)
    start_server()
    process = forkserver.Process(target=_serve, args=(address, str(folder / "python"), listening), daemon=True)
    process.start()
    listening.close()
    ready.recv()
    return folder


def python(*, fresh: bool = False) -> str:
    """Returns the command to use instead of `sys.executable`. `fresh`: imports this repository's modules again."""
    return str(commands() / (_FRESH if fresh else "python"))


def _serve(address: str, executable: str, listening: Any) -> None:
    """Forks a process for each request, until the process of the tests ends."""
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    """Connections of running programs, by process id."""
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen(64)
        listening.send(True)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    pid = _start(client, executable, [listener, selector, *clients.values()], [wake, wakes])
                    clients[pid] = client
                    selector.register(client, selectors.EVENT_READ, pid)
                elif key.fileobj == wake:
                    os.read(wake, 4096)
                    _report_ended(clients, selector)
                elif key.data in clients:  # the command was killed
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(key.fileobj)


def _report_ended(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        client = clients.pop(pid)
        with contextlib.suppress(KeyError):
            selector.unregister(client)
        with client, contextlib.suppress(OSError):
            client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _start(client: socket.socket, executable: str, closing: list[Any], descriptors: list[int]) -> int:
    """Forks the program that a command asks for and returns its process id."""
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    with client.makefile() as text:
        request = json.loads(text.readline())
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        client.sendall(f"{pid}\n".encode())
        return pid
    code = 70
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (client, *closing):
            each.close()
        for number in descriptors:
            os.close(number)
        with contextlib.suppress(OSError):  # the command has a session of its own
            os.setpgid(0, request["group"])
        sys.executable = executable
        if request["fresh"]:
            become.forget_ours()
        code = become.become(request["words"], request["folder"], request["environment"], files)
        become.leave(code)
    except BaseException:  # an error of this file or of `become`, not of the program
        os.write(files[2], traceback.format_exc().encode())
    finally:
        os._exit(code)
