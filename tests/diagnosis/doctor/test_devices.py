"""GPUs as nvidia-smi describes them; texts of real drivers."""

from collections.abc import Sequence

import pytest
import torch

from megatron.diagnosis.doctor import devices
from megatron.diagnosis.doctor.devices import examine_devices, links_of_topology
from megatron.diagnosis.doctor.findings import Section

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tNODE\t0-47\t0\t\tN/A
GPU2\tNV18\tSYS\t X \tSYS\t0-47\t0\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X

Legend:
  X    = Self
"""
ANSWERS = {
    "name": "NVIDIA H200, 580.95, Disabled\nNVIDIA H200, 580.95, Disabled\n",
    "clocks.current.sm": "1980, 1980, 40, 700.00, 700.00\n345, 1980, 91, 500.00, 700.00\n",
    "clocks_throttle_reasons.hw_slowdown": "Not Active, Not Active\nActive, Not Active\n",
    "pcie.link.gen.max": "5, 16, 16\n5, 8, 16\n",
    "ecc.errors.uncorrected.volatile.total": "0\n3\n",
}


def nvidia_smi(words: Sequence[str]) -> str | None:
    if words[1] == "topo":
        return TOPOLOGY
    return ANSWERS[words[1].removeprefix("--query-gpu=").split(",")[0]]


def test_links() -> None:
    assert links_of_topology(TOPOLOGY) == ["NV18", "NV18", "SYS"]
    assert links_of_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == [] and links_of_topology("") == []


def test_a_host_without_gpus_says_what_it_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    section = examine_devices(lambda words: None)
    assert section.unseen and not section.findings
    (fault,) = examine_devices(nvidia_smi).findings
    assert fault.level == "fault" and "nvidia-smi shows 2 GPUs, and torch" in fault.text


def test_each_trouble_of_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda index: "NVIDIA H200",
        "mem_get_info": lambda index: (20 << 30, 140 << 30),
        "can_device_access_peer": lambda a, b: False,
    }
    for name, function in fake.items():
        monkeypatch.setattr(devices.torch.cuda, name, function)
    section: Section = examine_devices(nvidia_smi)
    text = "\n".join(finding.text for finding in section.findings)
    for words in (
        "GPU 1 is limited to 500 W of 700 W", "GPU 1 has 91 degrees", "GPU 1 has lowered its clocks",
        "GPU 1 has 8 of 16 PCIe lanes", "GPU 1 has 3 memory errors", "120.0 GiB of this rank's GPU are in use",
        "GPUs 0 and 1 cannot reach each other's memory (1 of 1 pairs)",
        "pairs of GPUs have different links (NV18, SYS)",
    ):  # fmt: skip
        assert words in text, words
    assert "GPU 0 " not in text
    assert {fact.name: fact.text for fact in section.facts}["driver"] == "580.95"


def test_a_driver_that_does_not_know_a_question_answers_the_others() -> None:
    assert devices._query(("name",), lambda words: None) == []
    assert devices._query(("name", "power.limit"), lambda words: "NVIDIA H200, [N/A]\n") == [
        {"name": "NVIDIA H200", "power.limit": "[N/A]"}
    ]
    assert devices._number("[N/A]") is None and devices._number("700.00") == 700
