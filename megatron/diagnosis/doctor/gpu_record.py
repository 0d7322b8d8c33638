"""Writes measured rates as a GPU record, which the planner reads: --gpu FILE."""

import json
import re
import socket
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron.core.utils.files import write_atomically
from megatron.diagnosis.doctor.measurement import Rates
from megatron.diagnosis.planning.figures import Figure
from megatron.diagnosis.planning.gpus import Gpu, gpu_named

_KNOWN = {
    r"H200": "h200",
    r"H100.*PCIe": "h100-pcie",
    r"H100": "h100",
    r"A100.*80GB": "a100-80gb",
    r"A100": "a100-40gb",
    r"B200": "b200",
    r"RTX 4090": "rtx-4090",
    r"L40S": "l40s",
}
"""Names of the table by what torch calls the GPU."""


def known_gpu(device_name: str) -> Gpu | None:
    """Returns the record of the table for a GPU that torch calls so, None for others."""
    return next((gpu_named(name) for pattern, name in _KNOWN.items() if re.search(pattern, device_name)), None)


def record_text(
    device_name: str, multiprocessors: int, memory: int, rates: Sequence[Rates], links: Mapping[str, float]
) -> str:
    """Returns a record as TOML, from the medians of the ranks. `links` are bytes a second by the record's key (nvlink,
    nic, collectives). The data sheet's peak and what was not measured come from the table, where it has this GPU."""
    known = known_gpu(device_name)
    source = f"tools/doctor.py --measure on {len(rates)} {device_name} ({socket.gethostname()})"
    products = statistics.median(one.products for one in rates)
    peak = known.bf16_peak if known else Figure(products, "measured products, as no data sheet is known", 0.3)
    launch = known.layer_launch if known else Figure(3.5e-3, "as measured beside an H200; other hosts differ", 0.5)
    figures = {
        "memory": Figure(float(memory), source),
        "bf16_peak": peak,
        "bf16_products": Figure(products, source, 0.05),
        "attention_64": Figure(statistics.median(one.attention_64 or 0.0 for one in rates), source, 0.05),
        "attention_128": Figure(statistics.median(one.attention_128 or 0.0 for one in rates), source, 0.05),
        "copy": Figure(statistics.median(one.copy for one in rates), source, 0.03),
        "layer_launch": launch,
    }
    for key in ("fp8_peak", "fp8_products", "nvlink", "collectives", "pcie", "nic"):
        value = getattr(known, key, None)
        if value is not None:
            figures[key] = value
    figures |= {key: Figure(value, source, 0.1) for key, value in links.items()}
    name = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    lines = [f"[{name}]", f"title = {json.dumps(device_name)}", f"multiprocessors = {multiprocessors}"]
    if known is not None and known.gpus_per_nvlink_domain is not None:
        lines.append(f"gpus_per_nvlink_domain = {known.gpus_per_nvlink_domain}")
    for key, figure in figures.items():
        lines.append(
            f"{key} = {{value = {figure.value:.6g}, error = {figure.error}, source = {json.dumps(figure.source)}}}"
        )
    return "\n".join(lines) + "\n"


def write_record(path: Path, rates: Sequence[Rates], links: Mapping[str, float]) -> None:
    """Writes the record of this process's GPU, and reads it as the planner does."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    text = record_text(properties.name, properties.multi_processor_count, properties.total_memory, rates, links)
    write_atomically(path, text)
    gpu_named(str(path))
