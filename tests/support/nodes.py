"""Two machines for a test: network namespaces of this one, with a cable between them, where the system allows it.

A node has a network, host name and process ids of its own, and shares the files of this machine. Where namespaces
are not allowed, both nodes are groups of processes of this host; `Nodes.kind` says which it is.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

_NAMESPACES = ("--net", "--pid", "--uts", "--mount")
_MARK = "TEST_NODE"


@dataclass
class Nodes:
    """Two nodes; a context manager, whose end kills all of their processes."""

    kind: str = "two agents on one host: this machine allows no network namespaces"
    addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.1")
    interface: str = "lo"
    separate: bool = False
    """Whether the nodes are namespaces, so their network can be cut."""
    _name: str = field(default_factory=lambda: secrets.token_hex(6))
    _cluster: subprocess.Popen[bytes] | None = None
    _inside: list[int] = field(default_factory=list)
    """First process of each node."""

    def __enter__(self) -> "Nodes":
        if shutil.which("unshare") and shutil.which("nsenter") and shutil.which("ip"):
            self._try_namespaces()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in range(2):
            self.kill(node)
        if self._cluster is not None:
            self._cluster.kill()
            self._cluster.wait()

    def start(self, node: int, command: Sequence[str | Path], output: Path, folder: Path) -> "subprocess.Popen[bytes]":
        """Starts a command on a node. It writes to the file `output`."""
        enter = ["nsenter", "-t", str(self._inside[node]), *self._as_user, *_NAMESPACES] if self.separate else []
        enter += [f"--wd={folder}"] if self.separate else []
        marks = {_MARK: f"{self._name}-{node}", "GLOO_SOCKET_IFNAME": self.interface}
        with output.open("ab") as file:
            return subprocess.Popen(
                [*enter, *map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **marks},
                start_new_session=True,
            )

    def processes(self, node: int, variable: str | None = None) -> list[int]:
        """Returns the living processes that `start` began on a node, with their children; only those with this
        environment variable (`RANK=3`) if one is given."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().decode(errors="replace")  # empty: it has ended
                ours = f"{_MARK}={self._name}-{node}".encode() in words and not command.startswith("nsenter")
                if ours and command and (variable is None or variable.encode() in words):
                    found.append(int(folder.name))
        return found

    def kill(self, node: int) -> None:
        """Kills all processes of a node at once, its launcher too. The node can start others."""
        end = time.monotonic() + 20.0
        while (pids := self.processes(node)) and time.monotonic() < end:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def cut(self) -> None:
        """Cuts the network between the nodes: nothing arrives any more, and no connection is closed. On one host the
        second node is frozen instead."""
        if self.separate:
            self._in_node(1, "ip", "link", "set", "eth0", "down")
            return
        for pid in self.processes(1):
            os.kill(pid, signal.SIGSTOP)

    @property
    def _as_user(self) -> list[str]:
        return [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]

    def _try_namespaces(self) -> None:
        """Makes a network in which both nodes are, so nothing of it outlives the test."""
        as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        one = f"unshare {' '.join(_NAMESPACES)} --fork --kill-child --mount-proc sleep infinity"
        outer = ["unshare", *as_root, "--net", "--pid", "--fork", "--kill-child", "sh", "-c", f"{one} & {one} & wait"]
        self._cluster = subprocess.Popen(outer, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 10.0
        while len(self._inside) < 2 and self._cluster.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            self._inside = sorted(_sleepers(self._cluster.pid))
        with contextlib.suppress(subprocess.CalledProcessError):
            if len(self._inside) == 2:
                self._connect()
                self.kind, self.separate = "two nodes in network namespaces of this machine", True
                self.addresses, self.interface = ("10.77.0.1", "10.77.0.2"), "eth0"

    def _connect(self) -> None:
        names = [f"end{node}" for node in range(2)]
        both = [word for name, pid in zip(names, self._inside, strict=True) for word in ("name", name, "netns", pid)]
        create = ["ip", "link", "add", *both[1:4], "type", "veth", "peer", *both[4:]]
        self._in_node(0, *map(str, create))
        for node, name in enumerate(names):
            self._in_node(node, "hostname", f"node{node}")
            self._in_node(node, "ip", "link", "set", name, "name", "eth0")
            self._in_node(node, "ip", "addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                self._in_node(node, "ip", "link", "set", interface, "up")

    def _in_node(self, node: int, *command: str) -> None:
        enter = ["nsenter", "-t", str(self._inside[node]), *self._as_user, "--net", "--uts"]
        subprocess.run([*enter, *command], check=True, capture_output=True)


def _sleepers(pid: int) -> Iterator[int]:
    """Yields the processes below `pid` that are the first of a node: the others of the tree wait for them."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        for child in map(int, children.read_text().split()):
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep"):
                yield child
            yield from _sleepers(child)
