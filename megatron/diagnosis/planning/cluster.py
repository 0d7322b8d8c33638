"""The machines of a run: how many GPUs, their nodes and NVLink domains, and the rate between nodes."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.figures import Figure
from megatron.diagnosis.planning.gpus import Gpu

_SHARE_OF_LINK = 0.8
_ERROR_OF_LINK = 0.2
_NVLINK_LATENCY = Figure(15e-6, "15 us for each collective within a node: an estimate", 0.5)
_LINK_LATENCY = Figure(30e-6, "30 us for each doubling of the nodes of a collective: an estimate", 0.5)


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind. Ranks are placed in order: rank r is GPU r % gpus_per_node of node r // gpus_per_node."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int
    gpus_per_nvlink_domain: int
    link: float | None = None
    """Bytes a second that a GPU sends to other nodes; None: the rate of the GPU's record."""

    def gather_seconds(self, whole: float, ranks: Sequence[int]) -> Figure:
        """Returns the time of an all-gather or a reduce-scatter of tensors of `whole` bytes over ranks; an all-reduce
        takes twice as long. Each GPU sends a part over its own link to other nodes, while it sends to its neighbours in
        the node. Raises UserError if a rate is not known."""
        size, local = len(ranks), self._most_together(ranks)
        if size == 1 or not whole:
            return Figure(0.0, "no communication")
        moving, parts, nodes = [], [_NVLINK_LATENCY], -(-size // local)
        if local > 1:
            moving.append(self.inside(ranks).per(whole * (local - 1) / local))
        if nodes > 1:
            moving.append(self.between().per(whole * (nodes - 1) / nodes / local))
            parts.append(_LINK_LATENCY.times((nodes - 1).bit_length()))
        return _sum([max(moving, key=lambda each: each.value), *parts])

    def exchange_seconds(self, sent: float, ranks: Sequence[int]) -> Figure:
        """Returns the time of an all-to-all in which each rank sends `sent` bytes, an equal part to each other rank."""
        size, local = len(ranks), self._most_together(ranks)
        if size == 1 or not sent:
            return Figure(0.0, "no communication")
        parts, moving = [_NVLINK_LATENCY], []
        if local > 1:
            moving.append(self.inside(ranks).per(sent * (local - 1) / (size - 1)))
        if size > local:
            moving.append(self.between().per(sent * (size - local) / (size - 1)))
            parts.append(_LINK_LATENCY)
        return _sum([max(moving, key=lambda each: each.value), *parts])

    def message_seconds(self, sent: float, sender: int, receiver: int) -> Figure:
        """Returns the time of a message between two ranks."""
        if self._most_together((sender, receiver)) == 2:
            return _sum([self.inside((sender, receiver)).per(sent), _NVLINK_LATENCY])
        return _sum([self.between().per(sent), _LINK_LATENCY])

    def inside(self, ranks: Sequence[int]) -> Figure:
        """Returns the rate of a GPU's collectives with ranks of its node. Raises UserError if it is not known."""
        key = "collectives" if self._in_one_domain(ranks) else "pcie"
        rate: Figure | None = getattr(self.gpu, key)
        if rate is None:
            raise UserError(f"the record of {self.gpu.name} has no rate within a node: add the key {key}")
        return rate

    def between(self) -> Figure:
        """Returns the rate at which a GPU sends to other nodes. Raises UserError if it is not known."""
        if self.link is not None:
            source = f"{_SHARE_OF_LINK:.0%} of --link: an estimate of NCCL's share"
            return Figure(self.link * _SHARE_OF_LINK, source, _ERROR_OF_LINK)
        if self.gpu.nic is None:
            raise UserError(f"{self.gpu.title} has no known rate between nodes: give --link, such as --link 400Gb")
        source = f"{_SHARE_OF_LINK:.0%} of a port, an estimate of NCCL's share; {self.gpu.nic.source}"
        return Figure(self.gpu.nic.value * _SHARE_OF_LINK, source, _ERROR_OF_LINK)

    def _most_together(self, ranks: Sequence[int]) -> int:
        """Returns how many of the ranks need no link between nodes, at most."""
        island = max(self.gpus_per_node, self.gpus_per_nvlink_domain)
        return max(Counter(rank // island for rank in ranks).values())

    def _in_one_domain(self, ranks: Sequence[int]) -> bool:
        """Whether the ranks of each node are in one NVLink domain."""
        node, domain = self.gpus_per_node, self.gpus_per_nvlink_domain
        return domain >= node or all(
            len({rank // domain for rank in ranks if rank // node == place}) == 1
            for place in {rank // node for rank in ranks}
        )


def _sum(parts: Sequence[Figure]) -> Figure:
    value = sum(each.value for each in parts)
    error = sum(each.value * each.error for each in parts) / value
    return Figure(value, parts[0].source, error)


def link_of(text: str) -> float:
    """Returns the bytes a second of a text such as 400Gb (gigabits), 50GB (gigabytes) or 400Gb/s. Raises UserError for
    other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(G|T|M)(b|B)(?:/s|ps)?", text.strip().replace("bit", "b"))
    if match is None or float(match[1]) == 0:
        raise UserError(
            f"--link {text}: expected the rate of a GPU to other nodes, such as 400Gb (bits) or 50GB (bytes)"
        )
    return float(match[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]] / (8 if match[3] == "b" else 1)
