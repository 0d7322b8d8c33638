"""Clusters: GPUs by the names that people give them, nodes and links."""

import pytest

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.hardware import cluster_of, gpu_of
from megatron.diagnosis.planning.specification import Specification, read_specification
from megatron.diagnosis.planning.specification_text import Answer, Answers


def read(**given: str) -> Specification:
    return read_specification(Answers({field: Answer(text, f"--{field}") for field, text in given.items()}))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100 80GB", "h100"), ("NVIDIA H100 SXM5 80 GB", "h100"), ("H100 PCIe 80GB", "h100-pcie"),
        ("A100 40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("H200 141GB", "h200"), ("h200", "h200"),
        ("B200 192GB", "b200"), ("RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090 24GB", "rtx-4090"),
        ("L40S 48GB", "l40s"), ("8x H100 80GB", "h100"),
    ],
)  # fmt: skip
def test_gpus_by_name(text: str, name: str) -> None:
    gpu, question = gpu_of(text)
    assert gpu is not None and gpu.name == name and question == ""


def test_a_name_without_memory_is_asked_about() -> None:
    gpu, question = gpu_of("A100")
    assert gpu is None and "80GB" in question and "40GB" in question and question.endswith("?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100 40GB", "none with 40 GB; nearest: NVIDIA H100 SXM 80GB"),
        ("V100 32GB", "not known; known are .*a100-80gb"),
    ],
)
def test_gpus_that_do_not_exist(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        gpu_of(text)


@pytest.mark.parametrize(
    ("text", "gigabits"),
    [
        ("NVLink intra-node, InfiniBand inter-node (400 Gb/s)", 400), ("NVLink 900 GB/s, InfiniBand NDR", 400),
        ("8x 200Gb RoCE", 200), ("RoCE 100Gb/s", 100), ("NVLink, 1x 400Gb InfiniBand", 50), ("InfiniBand HDR", 200),
    ],
)  # fmt: skip
def test_rates_between_nodes(text: str, gigabits: float) -> None:
    gpu, _ = gpu_of("H100 80GB")
    cluster, notes = cluster_of(read(gpus="64", gpus_per_node="8", interconnect=text), gpu)
    assert cluster.link == pytest.approx(gigabits / 8 * 1e9)
    assert len(notes) == 1


def test_nodes() -> None:
    gpu, _ = gpu_of("H100 80GB")
    cluster, notes = cluster_of(read(gpus="64"), gpu)
    assert (cluster.gpus_per_node, cluster.gpus_per_nvlink_domain, cluster.link) == (8, 8, None)
    assert any("8 assumed" in note for note in notes) and any("400 Gb/s" in note for note in notes)
    assert cluster_of(read(gpus="4", gpus_per_node="8"), gpu)[0].gpus_per_node == 4
    assert cluster_of(read(gpus="8", interconnect="PCIe only, no NVLink"), gpu)[0].gpus_per_nvlink_domain == 1
    assert cluster_of(read(gpus="8"), gpu_of("RTX 4090")[0])[0].gpus_per_nvlink_domain == 1
    with pytest.raises(UserError, match=r"60 GPUs .* no whole number of nodes with 8 .*; nearest: 56 or 64 GPUs"):
        cluster_of(read(gpus="60", gpus_per_node="8"), gpu)
