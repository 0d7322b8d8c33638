"""megatron/training/log/trackers.py: what each service gets, by its real package and without a network."""

import json
import os
import subprocess
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from prometheus_client import parser
from support.programs import python

from megatron.core.exceptions import UserError
from megatron.training.log.records import Speed, StepRecord, ValidationRecord
from megatron.training.log.tensorboard import TagChoices
from megatron.training.log.trackers import RunFacts, Tracker, TrackerLog, tracker_log

FACTS = RunFacts("a run", {"lr": "0.1"}, None, False)


def record(log):
    log.steps([StepRecord(n, {"lm loss": float(n)}, consumed_samples=4 * n) for n in (1, 2, 3, 4)], Speed(0.5, 100.0))
    log.validation(ValidationRecord(4, {"lm loss": 0.0}, consumed_samples=16))
    log.close()


def test_a_text_file_for_prometheus_has_the_newest_values(tmp_path):
    path = tmp_path / "run.prom"
    record(tracker_log(f"prometheus:{path}", FACTS, TagChoices()))
    found = {family.name: family.samples[0].value for family in parser.text_string_to_metric_families(path.read_text())}
    assert found["megatron_lm_loss"] == 4.0 and found["megatron_iteration"] == 4.0
    assert found["megatron_lm_loss_validation"] == 0.0 and not any("samples" in name for name in found)
    with pytest.raises(UserError, match=r"--log-to prometheus:.*: cannot be written: Not a directory"):
        tracker_log(f"prometheus:{path}/file.prom", FACTS, TagChoices())


def test_opentelemetry_exports_gauges(monkeypatch):
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    record(tracker_log("opentelemetry", FACTS, TagChoices()))
    server.shutdown()
    server.server_close()
    request = metrics_service_pb2.ExportMetricsServiceRequest.FromString(bodies[-1])
    metrics = request.resource_metrics[0].scope_metrics[0].metrics
    found = {metric.name: metric.gauge.data_points[0] for metric in metrics}
    assert found["megatron.lm_loss"].as_double == 4.0 and found["megatron.iteration"].as_double == 4.0
    assert found["megatron.lm_loss"].attributes[0].value.string_value == "a run"


def test_a_service_that_fails_does_not_end_the_run(capsys):
    sent = []

    def send(points):
        sent.append(points)
        raise RuntimeError("the server\nis gone")

    record(TrackerLog("mlflow", Tracker(send, lambda: None), TagChoices()))
    assert len(sent) == 1
    assert capsys.readouterr().out == (
        "warning: --log-to mlflow: the server is gone; points are dropped from here on\n"
    )


@pytest.mark.parametrize("service", ["mlflow", "comet", "opentelemetry"])
def test_a_missing_package_is_named(service, monkeypatch):
    monkeypatch.setattr("importlib.import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(UserError, match=rf"--log-to {service} needs a package: pip install {service[:5]}"):
        tracker_log(service, FACTS, TagChoices())


RUN = """
import sys
from pathlib import Path
from megatron.training.log.records import Speed, StepRecord
from megatron.training.log.tensorboard import TagChoices
from megatron.training.log.trackers import RunFacts, tracker_log

for first in (1, 3):
    flags = {f"flag-{n}": str(n) for n in range(150)}
    log = tracker_log(sys.argv[1], RunFacts("a run", flags, Path(sys.argv[2]), first > 1), TagChoices())
    log.steps([StepRecord(n, {"lm loss": n + 0.25}, learning_rate=0.1) for n in (first, first + 1)], Speed(0.5))
    log.close()
"""


def run(service: str, folder: Path, **variables: str) -> None:
    subprocess.run([python(), "-c", RUN, service, str(folder)], env={**os.environ, **variables}, check=True)


@pytest.mark.slow
def test_mlflow_continues_the_run_that_is_resumed(tmp_path):
    run("mlflow", tmp_path, MLFLOW_TRACKING_URI=f"file://{tmp_path}/store", MLFLOW_ALLOW_FILE_STORE="true")
    (losses,) = tmp_path.glob("store/0/*/metrics/lm loss")
    points = [line.split() for line in losses.read_text().splitlines()]
    assert [(step, value) for _, value, step in points] == [("1", "1.25"), ("2", "2.25"), ("3", "3.25"), ("4", "4.25")]
    assert len(list((losses.parents[1] / "params").iterdir())) == 150
    assert not list(losses.parent.glob("*samples*"))


@pytest.mark.slow
def test_comet_keeps_points_in_a_file_without_a_network(tmp_path):
    run("comet", tmp_path, COMET_OFFLINE_DIRECTORY=str(tmp_path), COMET_START_ONLINE="0")
    losses = []
    for archive in tmp_path.glob("*.zip"):
        with zipfile.ZipFile(archive) as files:
            lines = files.read("messages.json").decode().splitlines()
        metrics = [json.loads(line)["payload"].get("metric") or {} for line in lines]
        losses += [
            (metric["step"], metric["metricValue"]) for metric in metrics if metric.get("metricName") == "lm loss"
        ]
    assert sorted(losses) == [(1, 1.25), (2, 2.25), (3, 3.25), (4, 4.25)]
    key = (tmp_path / "comet_experiment_key.txt").read_text().strip()
    assert all(archive.name.startswith(key) for archive in tmp_path.glob("*.zip"))
