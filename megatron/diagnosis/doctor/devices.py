"""The GPUs of a host: kind, driver, clocks, links, errors. Without a GPU it says what it cannot see."""

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.diagnosis.doctor.findings import Section, size_text

Run = Callable[[Sequence[str]], str | None]
"""Runs a program and returns what it prints; None if it fails."""

_QUERIES = {
    "kind": ("name", "driver_version", "mig.mode.current"),
    "clocks": ("clocks.current.sm", "clocks.max.sm", "temperature.gpu", "power.limit", "power.default_limit"),
    "slowdown": ("clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown"),
    "slot": ("pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max"),
    "errors": ("ecc.errors.uncorrected.volatile.total",),
}
"""Questions to nvidia-smi by subject: a driver that does not know one of a subject answers none of it."""


_LINKS = "links between GPUs"


def run_program(words: Sequence[str]) -> str | None:
    """Returns the output of a program; None if it is missing, fails or takes over 5 seconds."""
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def examine_devices(run: Run = run_program, index: int | None = None) -> Section:
    """Returns the GPUs of this host, and how full that of this rank is: number `index`. `run` asks nvidia-smi."""
    section = Section("GPUs")
    answers = {subject: _query(fields, run) for subject, fields in _QUERIES.items()}
    kinds = answers["kind"]
    if not torch.cuda.is_available():
        section.add("GPUs", "none that torch sees", "fault")
        section.unseen.append("driver, clocks, links and rates of GPUs: torch sees no GPU")
        if kinds:
            section.fault(
                f"nvidia-smi shows {len(kinds)} GPUs, and torch {torch.__version__} sees none: install torch with CUDA "
                "for this driver, or look at CUDA_VISIBLE_DEVICES"
            )
        return section
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    section.add("GPUs", counted, "fault")
    free, total = torch.cuda.mem_get_info(index)
    section.add("memory of a GPU", size_text(total), "warning")
    if free < 0.9 * total:
        section.warn(
            f"{size_text(total - free)} of this rank's GPU are in use: end the program that uses it (nvidia-smi)"
        )
    if not kinds:
        section.unseen.append("driver, clocks and errors: nvidia-smi does not answer")
    else:
        section.add("driver", kinds[0]["driver_version"], "fault")
    _examine_clocks(section, answers)
    _examine_links(section, run)
    return section


def _query(fields: Sequence[str], run: Run) -> list[dict[str, str]]:
    """Returns a record for each GPU; none if nvidia-smi does not answer."""
    said = run(("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"))
    rows = list(csv.reader(io.StringIO(said or ""), skipinitialspace=True))
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _examine_clocks(section: Section, answers: dict[str, list[dict[str, str]]]) -> None:
    largest = [row["clocks.max.sm"] for row in answers["clocks"]]
    if largest:
        section.add("highest clocks", ", ".join(f"{clock} MHz" for clock in dict.fromkeys(largest)), "warning")
    for index, row in enumerate(answers["clocks"]):
        limit, usual = _number(row["power.limit"]), _number(row["power.default_limit"])
        if limit is not None and usual is not None and limit < 0.98 * usual:
            section.warn(
                f"GPU {index} is limited to {limit:.0f} W of {usual:.0f} W: nvidia-smi -pl {usual:.0f} restores it"
            )
        temperature = _number(row["temperature.gpu"])
        if temperature is not None and temperature >= 85:
            section.warn(f"GPU {index} has {temperature:.0f} degrees: it will lower its clocks; look at its cooling")
    for index, row in enumerate(answers["slowdown"]):
        if "Active" in row.values():
            section.warn(f"GPU {index} has lowered its clocks because of heat or power: look at its cooling and supply")
    for index, row in enumerate(answers["slot"]):
        width, most = _number(row["pcie.link.width.current"]), _number(row["pcie.link.width.max"])
        if width is not None and most is not None and width < most:
            section.warn(f"GPU {index} has {width:.0f} of {most:.0f} PCIe lanes: look at its seat in the slot")
    for index, row in enumerate(answers["errors"]):
        errors = _number(row["ecc.errors.uncorrected.volatile.total"])
        if errors:
            section.fault(f"GPU {index} has {errors:.0f} memory errors that were not corrected: take it out of service")


def _number(word: str) -> float | None:
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else None


def _examine_links(section: Section, run: Run) -> None:
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        a, b = apart[0]
        section.warn(f"GPUs {a} and {b} cannot reach each other's memory ({len(apart)} of {len(pairs)} pairs)")
    links = links_of_topology(run(("nvidia-smi", "topo", "-m")) or "")
    if links:
        section.add(_LINKS, ", ".join(f"{links.count(kind)} x {kind}" for kind in dict.fromkeys(links)), "warning")
        if len(set(links)) > 1:
            section.warn(f"pairs of GPUs have different links ({', '.join(dict.fromkeys(links))}): NVLink may be down")


def has_nvlink(sections: Iterable[Section]) -> bool:
    """Whether the GPUs of a host that was examined are connected by NVLink."""
    links = (fact.text for section in sections for fact in section.facts if fact.name == _LINKS)
    return any(" x NV" in text for text in links)


def links_of_topology(text: str) -> list[str]:
    """Returns the link of each pair of GPUs from the matrix of `nvidia-smi topo -m`: NV18, PIX, SYS, ..."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    gpus = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]  # the head has no X
    return [row[1 + other] for index, row in enumerate(gpus) for other in range(index + 1, len(gpus))]
