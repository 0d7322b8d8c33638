"""The cluster of a specification: GPUs by the names that people give them, nodes, and links."""

import re
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.cluster import Cluster, link_of
from megatron.diagnosis.planning.gpus import Gpu, gpu_named, known_gpus
from megatron.diagnosis.planning.specification import Specification

_INFINIBAND = {"xdr": "800Gb", "ndr": "400Gb", "hdr": "200Gb", "edr": "100Gb"}
"""Rates of a port by the generation of InfiniBand."""

_USUAL_NODE = 8


def gpu_of(text: str) -> tuple[Gpu | None, str]:
    """Returns the GPU that a text such as "NVIDIA H100 SXM5 80GB" names, and "". If several fit: None and a question.
    Raises UserError for an unknown GPU, and for a memory that it does not have, with the nearest ones."""
    if Path(text).suffix == ".toml" or Path(text).is_file():
        return gpu_named(text), ""
    plain = re.sub(r"^\s*\d+\s*[x×]\s*", "", text.lower().replace("nvidia", "").replace("geforce", ""))
    size = re.search(r"(\d+)\s*gi?b", plain)
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"\d+\s*gi?b", "", plain)))
    words |= {"rtx", "4090"} if "rtx4090" in words or "4090" in words else set()
    named = [gpu_named(name) for name in known_gpus()]
    fitting = [gpu for gpu in named if _model_words(gpu.name) <= words]
    most = max((len(_model_words(gpu.name)) for gpu in fitting), default=0)
    fitting = [gpu for gpu in fitting if len(_model_words(gpu.name)) == most]
    if not fitting:
        raise UserError(
            f"GPU type {text}: not known; known are {', '.join(known_gpus())}, and a TOML file may describe another one"
        )
    if size is None:
        if len(fitting) == 1:
            return fitting[0], ""
        sizes = " or ".join(_memory(gpu) for gpu in fitting)
        return None, f"How much memory has the {text}: {sizes} (GPU type and memory, --gpu)?"
    near = [gpu for gpu in fitting if abs(int(size[1]) * 1e9 / gpu.memory.value - 1) < 0.12]
    if not near:
        sizes = " or ".join(f"{gpu.title}" for gpu in fitting)
        raise UserError(f"GPU type {text}: there is none with {size[1]} GB; nearest: {sizes}")
    return near[0], ""


def _model_words(name: str) -> set[str]:
    """Returns the words of a GPU's name without its memory: {a100} of a100-80gb."""
    return {word for word in name.split("-") if not re.fullmatch(r"\d+gb", word)}


def _memory(gpu: Gpu) -> str:
    return next((word.upper() for word in gpu.name.split("-") if word.endswith("gb")), gpu.title)


def cluster_of(specification: Specification, gpu: Gpu) -> tuple[Cluster, list[str]]:
    """Returns the cluster and notes about what was assumed. Raises UserError if nodes and GPUs do not fit together."""
    gpus, notes = specification.gpus, []
    assert gpus is not None
    per_node = specification.gpus_per_node
    if per_node is None:
        per_node = min(gpus, _USUAL_NODE)
        notes.append(
            f"GPUs per node: not specified; {per_node} assumed, as in most servers of this kind (--gpus-per-node)"
        )
    elif gpus > per_node and gpus % per_node:
        near = gpus // per_node * per_node
        raise UserError(
            f"{gpus} GPUs ({specification.where['gpus']}) are no whole number of nodes with {per_node} "
            f"({specification.where['gpus_per_node']}); nearest: {near} or {near + per_node} GPUs"
        )
    link, note = _link(specification.interconnect, per_node)
    if gpus > per_node and link is None:
        notes.append(
            f"interconnect: no rate between nodes is specified; {gpu.nic.value * 8 / 1e9:.0f} Gb/s for each GPU "
            f"assumed ({gpu.nic.source})"
            if gpu.nic is not None
            else "interconnect: no rate between nodes is known"
        )
    domain = min(per_node, gpus, gpu.gpus_per_nvlink_domain or per_node)
    if specification.interconnect and re.search(
        r"no nvlink|without nvlink|pcie only", specification.interconnect, re.I
    ):
        domain = 1
    return Cluster(gpu, gpus, min(per_node, gpus), domain, link), notes + note


def _link(text: str | None, per_node: int) -> tuple[float | None, list[str]]:
    """Returns the bytes a second of a GPU to other nodes that a text such as "NVLink intra-node, InfiniBand NDR
    inter-node" says, and a note on how it was read. None: it says none."""
    for part in re.split(r"[,;+]|\band\b", text or ""):
        if re.search(r"nvlink|nvswitch|pcie|intra", part, re.IGNORECASE) and not re.search("inter-?node", part, re.I):
            continue
        rate = re.search(r"(?:(\d+)\s*[x×]\s*)?(\d+(?:\.\d+)?)\s*(G|T)(b|B)", part)
        if rate:
            ports = int(rate[1]) if rate[1] else per_node
            return link_of(f"{rate[2]}{rate[3]}{rate[4]}") * ports / per_node, [
                f"interconnect: {rate[0]} read as {rate[2]} {rate[3]}{rate[4]}/s "
                + (f"for each of {rate[1]} ports of a node" if rate[1] else "for each GPU")
            ]
        for generation, speed in _INFINIBAND.items():
            if re.search(rf"\b{generation}\b", part, re.IGNORECASE):
                return link_of(speed), [f"interconnect: InfiniBand {generation.upper()} is {speed}/s for each GPU"]
    return None, []
