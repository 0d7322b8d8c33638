"""The host of a process: limits that were really lowered, folders that really fail, ports that are really taken."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.diagnosis.doctor.findings import Section, size_text
from megatron.diagnosis.doctor.machine import examine_limits, examine_network, examine_storage


def texts(section: Section) -> dict[str, str]:
    return {fact.name: fact.text for fact in section.facts}


@pytest.mark.parametrize(("limit", "level"), [(5000, None), (3000, "warning"), (200, "fault")])
def test_open_files(limit: int, level: str | None) -> None:
    code = (
        "import resource; from megatron.diagnosis.doctor.machine import examine_limits\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "section = examine_limits(1)\n"
        "print([fact.text for fact in section.facts if 'open files' in fact.name][0])\n"
        "print([finding.level for finding in section.findings if 'open files' in finding.text])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(limit), str([level] if level else [])]


def test_ranks_that_share_cores() -> None:
    cores = int(texts(examine_limits(1))["cores of this process"])
    assert any(f"{cores + 1} ranks share {cores} cores" in one.text for one in examine_limits(cores + 1).findings)
    assert not any("share" in one.text for one in examine_limits(1).findings)


def test_the_rates_of_a_folder_and_nothing_left_in_it(tmp_path: Path) -> None:
    found = texts(examine_storage(tmp_path))
    assert found["write rate"].endswith(" MB/s") and found["folder (--folder)"] == str(tmp_path)
    assert not list(tmp_path.iterdir())
    assert "write rate" not in texts(examine_storage(tmp_path, probes=False))


def test_a_folder_that_cannot_be_used_is_a_fault(tmp_path: Path) -> None:
    (found,) = (one for one in examine_storage(tmp_path / "none").findings if one.level == "fault")
    assert "No such file or directory: a run could not save there" in found.text


def test_a_port_that_is_taken() -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        section = examine_network(str(port), is_alone=True)
        assert texts(section)["port of a run"] == f"{port} is taken"
        assert any("give MASTER_PORT" in one.text for one in section.findings)
        assert "port of a run" not in texts(examine_network(str(port), is_alone=False))
    assert texts(examine_network(str(port), is_alone=True))["port of a run"] == f"{port} is free"


def test_sizes() -> None:
    assert [size_text(size) for size in (2048, 3 << 20, 5 << 30, 1 << 40)] == [
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "1.0 TiB",
    ]
