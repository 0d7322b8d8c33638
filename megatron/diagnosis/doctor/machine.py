"""The host of a process: cores, memory, limits, shared memory, disk, name, port, clock."""

import contextlib
import os
import resource
import shutil
import socket
import tempfile
import time
from pathlib import Path

from megatron.diagnosis.doctor.findings import Section, size_text

_PROBE = 64 << 20
"""Bytes that the examination of a disk writes and removes."""
_SHARED = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")


def examine_limits(ranks_of_host: int) -> Section:
    """Returns cores, memory and limits of this process. `ranks_of_host` processes share the host."""
    section = Section("machine")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    section.add("cores of this process", cores, "warning")
    if cores < ranks_of_host:
        section.warn(
            f"{ranks_of_host} ranks share {cores} cores: each needs one for itself, and more for its data workers; "
            "start fewer, or give the job more cores"
        )
    total, available = _memory()
    if total is None or available is None:
        section.unseen.append("memory: this system has no /proc/meminfo")
    else:
        section.add("memory", size_text(total))
        section.add("memory available", size_text(available))
        if available < 0.05 * total:
            section.warn(f"{size_text(available)} of {size_text(total)} memory are available: end other programs")
    _examine_open_files(section)
    _examine_locked_memory(section)
    return section


def _memory() -> tuple[int | None, int | None]:
    """Returns the bytes of the host's memory, and those that programs can still get."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return found.get("MemTotal"), found.get("MemAvailable")
    return None, None


def _examine_open_files(section: Section) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a run raises its own limit to the hard one
    text = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    section.add("open files (ulimit -Hn)", text, "warning")
    if hard != resource.RLIM_INFINITY and hard < 4096:
        report = section.fault if hard < 256 else section.warn
        report(f"at most {hard} open files (ulimit -Hn): large data sets and many ranks need more; raise it to 65536")


def _examine_locked_memory(section: Section) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft)
    section.add("locked memory (ulimit -l)", text, "warning")
    if soft != resource.RLIM_INFINITY and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        section.warn(
            f"{text} of locked memory (ulimit -l), and this host has InfiniBand, which locks its buffers: make it "
            "unlimited (docker run --ulimit memlock=-1)"
        )


def examine_storage(folder: Path, probes: bool = True) -> Section:
    """Returns shared memory, temporary folder, and the free space of `folder`, where a run would save. With `probes` a
    file is written there and removed, for its rates."""
    section, folder = Section("storage"), folder.absolute()
    if _SHARED.is_dir():
        usage = shutil.disk_usage(_SHARED)
        section.add("shared memory (/dev/shm)", size_text(usage.total), "warning")
        if usage.free < 1 << 30:
            report = section.fault if usage.free < 32 << 20 else section.warn
            report(
                f"{size_text(usage.free)} of {size_text(usage.total)} in /dev/shm are free: NCCL and data workers "
                "exchange through it; remove old files there (docker run --shm-size=16g or --ipc=host)"
            )
    else:
        section.unseen.append("shared memory: there is no /dev/shm")
    section.add("temporary files (TMPDIR)", os.environ.get("TMPDIR") or tempfile.gettempdir(), "warning")
    _examine_folder(section, folder, probes)
    return section


def _examine_folder(section: Section, folder: Path, probes: bool) -> None:
    section.add("folder (--folder)", folder, "warning")
    try:
        usage = shutil.disk_usage(folder)
        section.add("free space", size_text(usage.free))
        if usage.free < 10 << 30:
            section.warn(
                f"{folder}: {size_text(usage.free)} are free: a checkpoint of 1 billion parameters needs 14 GiB"
            )
        if probes and usage.free > 4 * _PROBE:
            written, read = _disk_rates(folder)
            section.add("write rate", f"{written / 1e6:,.0f} MB/s")
            section.add("read rate", f"{read / 1e6:,.0f} MB/s, from memory perhaps")
            if written < 100e6:
                minutes = 14e9 / written / 60
                section.warn(f"{folder}: {written / 1e6:.0f} MB/s: a checkpoint of 14 GB takes {minutes:.0f} minutes")
    except OSError as error:
        section.fault(f"{folder}: {error.strerror or error}: a run could not save there; --folder names another")


def _disk_rates(folder: Path) -> tuple[float, float]:
    """Returns the bytes a second in which a file is written to the disk, and read again."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        began = time.perf_counter()
        for _ in range(_PROBE >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        file.seek(0)
        while file.read(1 << 20):
            pass
        return _PROBE / (written - began), _PROBE / (time.perf_counter() - written)


def examine_network(environ_port: str | None, is_alone: bool, nodes: int = 1) -> Section:
    """Returns the name and address of the host, its InfiniBand ports, and whether a run's port is free. Under a
    launcher (not `is_alone`) the launcher serves the port. `nodes` is the number of hosts, if it is known."""
    section = Section("network")
    host = socket.gethostname()
    section.add("host", host)
    try:
        address = socket.gethostbyname(host)
    except OSError:
        section.warn(f"the host's name {host} has no address: gloo needs one; add it to /etc/hosts")
    else:
        section.add("address", address)
        if nodes > 1 and address.startswith("127."):
            section.fault(
                f"the host's name {host} is {address}, which other nodes cannot reach: gloo uses it; mend /etc/hosts, "
                "or name the network card in GLOO_SOCKET_IFNAME"
            )
    _examine_infiniband(section)
    port = int(environ_port) if environ_port is not None and environ_port.isdecimal() else 29500
    if is_alone and 0 < port < 1 << 16:
        free = _is_free(port)
        section.add("port of a run", f"{port} is {'free' if free else 'taken'}")
        if not free:
            section.warn(
                f"port {port} is taken: another run may use it; give MASTER_PORT (torchrun --master_port) another"
            )
    section.add("time", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))
    return section


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _examine_infiniband(section: Section) -> None:
    if not _INFINIBAND.is_dir():
        section.unseen.append("InfiniBand: this host shows none")
        return
    rates: list[str] = []
    for port in sorted(_INFINIBAND.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            state, rate = (port / "state").read_text().strip(), (port / "rate").read_text().strip()
            name = f"{port.parent.parent.name} port {port.name}"
            if state.endswith("ACTIVE"):
                rates.append(rate)
            else:
                section.warn(f"InfiniBand {name} is {state.split(': ')[-1]}: look at its cable and its switch")
    counted = ", ".join(f"{rates.count(rate)} x {rate}" for rate in dict.fromkeys(rates))
    section.add("InfiniBand", counted or "no active port", "warning")
