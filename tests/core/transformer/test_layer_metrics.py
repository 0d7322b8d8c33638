"""What layers report is added up, read once, and not counted without gradients."""

import torch
from torch import nn

from megatron.core.transformer.layer_metrics import LayerMetrics, take_layer_metrics


class Module(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.metrics = LayerMetrics(layer)


def test_totals_and_counts_are_added_up_and_read_once() -> None:
    chunk = nn.Sequential(Module(3), nn.Linear(1, 1))
    chunk[0].metrics.add("load", torch.tensor(2.0), 4)
    chunk[0].metrics.add("load", torch.tensor(3.0), torch.tensor(1))
    (report,) = take_layer_metrics([chunk])
    assert (report.name, report.layer, float(report.total), float(report.count)) == ("load", 3, 5.0, 5.0)
    assert report.total.dtype is torch.float64
    assert take_layer_metrics([chunk]) == []


def test_an_evaluation_is_not_counted() -> None:
    module = Module(1)
    with torch.no_grad():
        module.metrics.add("load", torch.tensor(2.0), 1)
    assert take_layer_metrics([module]) == []
