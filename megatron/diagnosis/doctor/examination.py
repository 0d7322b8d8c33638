"""Examines the machines of a run: each rank looks at its own, then the ranks compare what they found."""

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.utils.rendezvous import check_torchrun_variables, local_device, start_torch_distributed
from megatron.diagnosis.doctor.comparison import (
    RankReport,
    differences,
    shared_findings,
    slow_links,
    slow_ranks,
    wrong_clocks,
)
from megatron.diagnosis.doctor.devices import examine_devices, has_nvlink
from megatron.diagnosis.doctor.findings import Finding, Section
from megatron.diagnosis.doctor.gpu_record import write_record
from megatron.diagnosis.doctor.machine import examine_limits, examine_network, examine_storage
from megatron.diagnosis.doctor.measurement import Rates, measure_collectives, measure_links, measure_rank
from megatron.diagnosis.doctor.software import examine_software
from megatron.training.config.settings import ranks_of_host
from megatron.training.launch.launcher_variables import take_ranks_of_launcher
from megatron.training.launch.process_state import machine_name


@dataclass(frozen=True)
class Examination:
    """The result, the same on all ranks."""

    reports: tuple[RankReport, ...]
    findings: tuple[Finding, ...]
    measured: tuple[str, ...] = ()
    """Lines about the rates."""

    @property
    def exit_code(self) -> int:
        """0: all is well; 1: warnings; 2: faults."""
        levels = {finding.level for finding in self.findings}
        return 2 if "fault" in levels else 1 if levels else 0


def examine(folder: Path, measures: bool, record: Path | None, wait: float) -> Examination:
    """Examines the machine of this process, and, under a launcher, compares it with those of the other ranks.

    `folder` is where a run would save. With `measures` all ranks measure rates, and rank 0 writes those of its kind of
    GPU to `record`. Ranks wait for each other for `wait` seconds. Raises UserError for wrong variables of a launcher,
    StartFailed if ranks do not find each other.
    """
    take_ranks_of_launcher()
    check_torchrun_variables()
    local = ranks_of_host(os.environ) or 1
    sections = examine_host(folder, local)
    device = local_device() if measures else torch.device("cpu")
    start_torch_distributed(device, timedelta(seconds=wait), "nccl" if device.type == "cuda" else "gloo")
    ranks = RankCoordinator()
    host = next(fact.text for section in sections for fact in section.facts if fact.name == "host")
    told = ranks.gather([host, machine_name(), [section.as_json() for section in sections]])
    reports = tuple(RankReport(name, tuple(map(Section.from_json, found))) for name, _, found in told)
    ranks.gather(None)  # all ranks are at the same place now
    times = ranks.gather(time.time())
    findings = [*shared_findings(reports), *differences(reports), *wrong_clocks(times, reports)]
    if not measures:
        return Examination(reports, tuple(findings))
    lines, slow = _measure(ranks, device, [machine for _, machine, _ in told], reports, record)
    return Examination(reports, (*findings, *slow), tuple(lines))


def examine_host(folder: Path, local_ranks: int) -> list[Section]:
    """Returns all that this process sees of its host. Only the first rank of a host writes to its disk."""
    alone = "RANK" not in os.environ  # a launcher serves the port itself
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // local_ranks
    return [
        examine_software(),
        examine_limits(local_ranks),
        examine_storage(folder, probes=os.environ.get("LOCAL_RANK", "0") == "0"),
        examine_network(os.environ.get("MASTER_PORT"), alone, nodes),
        examine_devices(index=local_device().index),
    ]


def _measure(
    ranks: RankCoordinator,
    device: torch.device,
    machines: Sequence[str],
    reports: Sequence[RankReport],
    record: Path | None,
) -> tuple[list[str], list[Finding]]:
    """Returns lines about the rates of all ranks, and the slow ones."""
    rates = [Rates(**told) for told in ranks.gather(asdict(measure_rank(device)))]
    links: dict[tuple[int, int], float] = {}
    keys: dict[str, float] = {}
    if ranks.size > 1:
        mine = [[*pair, rate] for pair, rate in measure_links(device).items()]
        for first, second, rate in (one for told in ranks.gather(mine) for one in told):
            links[first, second] = min(rate, links.get((first, second), rate))
        keys["collectives"] = min(ranks.gather(measure_collectives(device)))
    kinds = {(a, b): "within a host" if machines[a] == machines[b] else "between hosts" for a, b in links}
    within = "nvlink" if has_nvlink(reports[0].sections) else "pcie"
    for key, kind in ((within, "within a host"), ("nic", "between hosts")):
        of_kind = [rate for pair, rate in links.items() if kinds[pair] == kind]
        if of_kind:
            keys[key] = statistics.median(of_kind)
    if len(set(machines)) > 1:
        keys.pop("collectives")  # the record's figure is that of an NVLink domain
    findings = [
        *slow_ranks("products", "TFLOP/s", [one.products / 1e12 for one in rates], reports),
        *slow_ranks("copies", "GB/s", [one.copy / 1e9 for one in rates], reports),
        *slow_links(links, kinds, reports),
    ]
    lines = list(_rate_lines(rates, links, kinds))
    if device.type != "cuda":
        lines.append("no GPU: these rates are of the CPU, and no record for the planner is written")
    elif record is not None:
        if ranks.rank == 0:
            write_record(record, rates, keys)
        lines.append(f"the rates are in {record}: --gpu {record} of the dry run and of tools/plan.py reads them")
    return lines, findings


def _rate_lines(
    rates: Sequence[Rates], links: Mapping[tuple[int, int], float], kinds: Mapping[tuple[int, int], str]
) -> Iterator[str]:
    def spread(values: Sequence[float], scale: float, unit: str) -> str:
        low, high = min(values) / scale, max(values) / scale
        return f"{high:,.3g} {unit}" if len(values) == 1 else f"{low:,.3g} to {high:,.3g} {unit}"

    yield f"products {spread([one.products for one in rates], 1e12, 'TFLOP/s')}"
    yield f"copies {spread([one.copy for one in rates], 1e9, 'GB/s')}"
    for name in ("attention_64", "attention_128"):
        found: list[Any] = [getattr(one, name) for one in rates if getattr(one, name) is not None]
        if found:
            yield f"attention, heads of {name.rpartition('_')[2]}: {spread(found, 1e12, 'TFLOP/s')}"
    for kind in dict.fromkeys(kinds.values()):
        of_kind = [rate for pair, rate in links.items() if kinds[pair] == kind]
        yield f"links {kind} {spread(of_kind, 1e9, 'GB/s')} each way"
