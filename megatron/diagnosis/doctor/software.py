"""Versions of the programs that must be alike on all nodes, and variables that change them."""

import importlib.util
import os
import platform
from collections.abc import Mapping
from importlib import metadata

import torch

from megatron.diagnosis.doctor.findings import Section
from megatron.training.config.version import version_text

_PACKAGES = ("numpy", "safetensors", "triton", "transformer_engine", "transformers")
_VARIABLES = ("NCCL_", "GLOO_", "UCX_", "CUDA_DEVICE_", "CUDA_LAUNCH", "TORCH_NCCL_", "PYTORCH_", "OMP_NUM_THREADS")
_MAY_DIFFER = ("NCCL_HOSTID", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that may name a card of one machine."""
_SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of a node then exchange through host memory",
    "NCCL_SHM_DISABLE": "processes of a node then exchange through the network",
    "NCCL_IB_DISABLE": "nodes then exchange through TCP",
    "CUDA_LAUNCH_BLOCKING": "each kernel then waits for the one before",
}


def examine_software(environ: Mapping[str, str] = os.environ) -> Section:
    """Returns versions, and the variables that change how they work."""
    section = Section("software")
    section.add("this program", version_text().split(", names")[0], "fault")
    section.add("Python", platform.python_version(), "fault")
    section.add("torch", torch.__version__, "fault")
    section.add("CUDA of torch", torch.version.cuda or "none", "fault")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    if nccl is not None:
        section.add("NCCL", nccl, "fault")
    else:
        section.unseen.append("NCCL: torch sees no GPU")
    for name in _PACKAGES:
        section.add(name, _version(name), "warning")
    section.add("system", f"{platform.system()} {platform.release()} {platform.machine()}", "warning")
    for name in sorted(environ):
        if name.startswith(_VARIABLES):
            section.add(name, environ[name], None if name in _MAY_DIFFER else "warning")
    for name, effect in _SLOW.items():
        if environ.get(name, "0") not in ("0", ""):
            section.warn(f"{name}={environ[name]} is set: {effect}; unset it, unless the machine needs it")
    return section


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "none"
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of no installed package"
