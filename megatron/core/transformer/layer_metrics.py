"""Metrics of layers. They accumulate on the device and are read when a log line is due.

A module with metrics keeps a `LayerMetrics` as its attribute `metrics`. Every metric is a mean, `total` / `count`. Both
are sums over micro-batches and over all ranks that hold the layer's tokens (`tp_dp_cp`); each rank adds its part. If
several ranks hold the same tokens, each of them adds these tokens to both sums, so the mean does not change.

Loads of experts are vectors of counts. Their statistics (the fullest expert, the entropy) are not means; they are
computed after the counts have been summed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.utils.recompute_cache import run_once_under_recompute

EXPERT_LOAD = "moe_load"
"""Name of the metric that counts the tokens of each expert of a layer."""


@dataclass(frozen=True)
class LayerMetric:
    """One metric of one layer."""

    name: str
    """Name on the log line, such as `load_balancing_loss`."""
    layer: int
    """Number of the layer, counted over the whole model from 1. Prediction layers come after the decoder's last."""
    total: Tensor
    """float64 scalar on the device; for `EXPERT_LOAD` the counts of all experts, [experts]."""
    count: Tensor
    """float64 scalar on the device."""


class LayerMetrics:
    """The metrics that one module has accumulated since they were last taken."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Adds this rank's part of a micro-batch. Adds nothing when gradients are off, as in an evaluation, or when a
        layer is recomputed."""
        if not torch.is_grad_enabled():
            return
        if not isinstance(count, Tensor):
            count = torch.full((), float(count), dtype=torch.float64, device=total.device)
        self._add(name, torch.stack([total.detach().double().reshape(()), count.detach().double().reshape(())]))

    def add_load(self, counts: Tensor) -> None:
        """Adds the number of this rank's tokens that each expert takes, [experts], under the conditions of `add`."""
        if torch.is_grad_enabled():
            self._add(EXPERT_LOAD, counts.detach().double())

    def _add(self, name: str, numbers: Tensor) -> None:
        run_once_under_recompute((self, name), lambda: self._add_now(name, numbers))

    def _add_now(self, name: str, numbers: Tensor) -> None:
        self._sums[name] = self._sums[name] + numbers if name in self._sums else numbers

    def take_tensors(self) -> dict[str, Tensor]:
        """Returns the sums by the metric's name and resets them (`graph_capture.TensorRecord`)."""
        sums, self._sums = self._sums, {}
        return sums

    def add_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Adds the sums that `take_tensors` returned."""
        for name, numbers in tensors.items():
            self._add_now(name, numbers)

    def take(self) -> Iterator[LayerMetric]:
        """Yields all metrics and resets them."""
        for name, numbers in self.take_tensors().items():
            is_load = name == EXPERT_LOAD
            total, count = (numbers, torch.ones_like(numbers[0])) if is_load else (numbers[0], numbers[1])
            yield LayerMetric(name, self.layer, total, count)


def take_layer_metrics(chunks: Iterable[nn.Module]) -> list[LayerMetric]:
    """Returns the metrics that all modules of a rank's model chunks have accumulated since the last call, and resets
    them."""
    return [metric for metrics in layer_metrics_of(chunks) for metric in metrics.take()]


def layer_metrics_of(chunks: Iterable[nn.Module]) -> list[LayerMetrics]:
    """Returns the metrics of all modules of a rank's model chunks."""
    found = [getattr(module, "metrics", None) for chunk in chunks for module in chunk.modules()]
    return [metrics for metrics in found if isinstance(metrics, LayerMetrics)]
