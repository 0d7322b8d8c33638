"""Draws the predicted peak memory of each kind of rank, by what holds it."""

from collections.abc import Sequence
from pathlib import Path

from megatron.diagnosis.memory.peak import RankPeak
from megatron.training.log.plot import new_figure, write_figure

_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "workspace", "context")
"""Fields of RankPeak, from the bottom to the top of a bar."""


def draw_peaks(peaks: Sequence[RankPeak], of_gpu: tuple[int, str], picture: Path) -> Path:
    """Writes a bar for each kind of rank, in GiB, and a line at the memory of a GPU (bytes and name), and returns the
    path. Raises UserError without matplotlib, or if the file cannot be written."""
    figure = new_figure((max(6.0, 1.5 + 0.6 * len(peaks)), 4.5))
    axis, places = figure.subplots(), range(len(peaks))
    below = [0.0] * len(peaks)
    for part in _PARTS:
        sizes = [getattr(peak, part) / 2**30 for peak in peaks]
        if any(sizes):
            axis.bar(places, sizes, bottom=below, label=part)
        below = [base + size for base, size in zip(below, sizes, strict=True)]
    axis.axhline(of_gpu[0] / 2**30, color="black", linewidth=0.8, linestyle="--", label=of_gpu[1])
    axis.set_xticks(
        places, [f"{peak.rank} (+{peak.ranks - 1})" for peak in peaks], rotation=45 if len(peaks) > 4 else 0
    )
    axis.set_xlabel("rank (and those that hold the same)")
    axis.set_ylabel("GiB at the peak of a step")
    figure.legend(loc="outside right upper", fontsize="small")
    return write_figure(figure, picture)
