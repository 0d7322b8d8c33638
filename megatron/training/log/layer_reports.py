"""Gathers the values that layers report (`megatron.core.transformer.layer_metrics`) when the log is written.

Each pipeline stage has its own layers. The ranks of a stage sum their values with one all-reduce; the stages then
exchange them. Names travel as JSON beside the numbers, so that no stage needs to know the layers of another.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.communication.collectives import all_reduce, numbers_of_ranks
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.layer_metrics import EXPERT_LOAD, layer_metrics_of, take_layer_metrics
from megatron.training.log.metrics import synchronization_allowed

Key = tuple[str, int]
"""Name and layer, as in a `LayerMetric`."""
Sums = dict[Key, tuple[list[float], float]]
"""Totals (one number, or one for each expert) and count."""

_DETAIL = "moe_load"
"""The log line leaves out values whose names begin with one of these."""


@dataclass(frozen=True)
class LayerNumbers:
    """Means of reported values over micro-batches, ranks, and the iterations of an interval."""

    by_layer: Mapping[Key, float] = field(default_factory=dict)

    def means(self) -> dict[str, float]:
        """Returns the mean of each value over the layers that report it."""
        values: dict[str, list[float]] = {}
        for (name, _), value in self.by_layer.items():
            values.setdefault(name, []).append(value)
        return {name: sum(found) / len(found) for name, found in values.items()}

    def line(self) -> dict[str, float]:
        """Returns the losses that layers add, which the log line shows beside the loss."""
        return {name: value for name, value in self.means().items() if not name.startswith(_DETAIL)}

    def tags(self, *, per_layer: bool) -> dict[str, float]:
        """Returns the values for files: the means and, with `per_layer`, each layer's value under Megatron-LM's tag,
        which counts layers from 0."""
        tags = self.means()
        if per_layer:
            for (name, layer), value in self.by_layer.items():
                if not name.startswith("mtp_"):  # their names contain the layer
                    tags[f"moe/{name}_layer_{layer - 1}"] = value
        return tags


class LayerReports:
    """Reads the reports of this rank's model chunks. Every rank makes the same calls."""

    def __init__(self, chunks: Iterable[nn.Module], groups: ProcessGroupCollection, device: torch.device) -> None:
        """Pipeline stages exchange reports if a module of any stage has metrics by now. All ranks of the run construct
        it together, and wait for each other."""
        self._chunks, self._groups, self._device = tuple(chunks), groups, device
        self._stages_tell = groups.size("pp") > 1 and any(
            number for (number,) in numbers_of_ranks([len(layer_metrics_of(self._chunks))])
        )
        self._since_line: Sums = {}

    def collect(self, *, reset: bool) -> tuple[LayerNumbers, LayerNumbers]:
        """Returns two sets of values: those reported since the last call, and those since the last call with
        `reset`."""
        with synchronization_allowed(self._device):
            found = self._of_all_stages(self._of_this_stage())
        for key, (totals, count) in found.items():
            before, counted = self._since_line.get(key, ([0.0] * len(totals), 0.0))
            self._since_line[key] = ([a + b for a, b in zip(before, totals, strict=True)], counted + count)
        line = LayerNumbers(_means(self._since_line))
        if reset:
            self._since_line = {}
        return LayerNumbers(_means(found)), line

    def _of_this_stage(self) -> Sums:
        reports = sorted(take_layer_metrics(self._chunks), key=lambda report: (report.layer, report.name))
        if not reports:
            return {}
        flat = torch.cat([torch.cat([r.total.reshape(-1), r.count.reshape(1)]) for r in reports])
        if self._groups.size("tp_dp_cp") > 1:
            all_reduce(flat, self._groups.tp_dp_cp)
        numbers, sums = iter(flat.tolist()), {}
        for report in reports:
            totals = [next(numbers) for _ in range(report.total.numel())]
            sums[report.name, report.layer] = (totals, next(numbers))
        return sums

    def _of_all_stages(self, own: Sums) -> Sums:
        if not self._stages_tell:
            return own
        group = self._groups.pp
        assert isinstance(group, ProcessGroup)
        told = RankCoordinator(group).gather([[*key, *values] for key, values in own.items()])
        return {(name, layer): (totals, count) for part in told for name, layer, totals, count in part}


def _means(sums: Sums) -> dict[Key, float]:
    means: dict[Key, float] = {}
    for (name, layer), (totals, count) in sorted(sums.items(), key=lambda item: (item[0][1], item[0][0])):
        if name == EXPERT_LOAD:
            means |= {(f"{name}_{what}", layer): value for what, value in load_numbers(totals).items()}
        else:
            means[name, layer] = totals[0] / count if count else 0.0
    return means


def load_numbers(counts: Sequence[float]) -> dict[str, float]:
    """Returns two measures of balance, by name. `max`: the largest number of tokens of an expert, divided by the mean
    number. `entropy`: the entropy of the experts' shares of tokens, divided by the entropy of equal shares."""
    total = sum(counts)
    if not total:
        return {"max": 0.0, "entropy": 0.0}
    shares = [count / total for count in counts]
    entropy = -sum(share * math.log(share) for share in shares if share)
    return {"max": max(shares) * len(counts), "entropy": entropy / math.log(len(counts)) if len(counts) > 1 else 1.0}
