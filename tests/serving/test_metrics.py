"""Counters and gauges in Prometheus's form, read by its own parser."""

import pytest

from megatron.serving.metrics import Metrics

parser = pytest.importorskip("prometheus_client.parser")


def test_values_are_read_back() -> None:
    metrics, now = Metrics(), [3.0]
    metrics.counter("requests_total", "Requests.")
    metrics.counter("tokens_total", "Tokens.")
    metrics.gauge("running", "Texts.", lambda: now[0])
    metrics.add("requests_total", path='/"odd"\\\n', status="200")
    metrics.add("requests_total", 2, path="/v1", status="400")
    now[0] = 5.0
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }
    assert found == {
        ("megatron_serving_requests_total", (("path", '/"odd"\\\n'), ("status", "200"))): 1,
        ("megatron_serving_requests_total", (("path", "/v1"), ("status", "400"))): 2,
        ("megatron_serving_tokens_total", ()): 0,
        ("megatron_serving_running", ()): 5,
    }
    assert metrics.value("requests_total") == 3
