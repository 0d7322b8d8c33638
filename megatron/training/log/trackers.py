"""Sends the scalars of a run to other services: MLflow, Comet, OpenTelemetry, and Prometheus by a text file.

Each service is configured by its own environment variables, as its package documents. A service that fails during the
run does not end the run: its points are dropped from then on, and a line says so.
"""

import contextlib
import importlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import write_atomically
from megatron.training.log.event_files import VS_SAMPLES
from megatron.training.log.records import Speed, StepRecord, ValidationRecord
from megatron.training.log.tensorboard import ScalarLog, TagChoices, keep_run_id, kept_run_id

PROMETHEUS = "prometheus:"

Point = tuple[str, float, int]
"""Tag, value and iteration."""


@dataclass(frozen=True)
class RunFacts:
    """What a service is told about the run."""

    name: str | None
    flags: Mapping[str, str]
    folder: Path | None
    """Where the ids of the run are kept, so that a resumed run continues them."""
    resumed: bool


@dataclass(frozen=True)
class Tracker:
    """A service that was opened for this run."""

    send: Callable[[Sequence[Point]], object]
    close: Callable[[], object]


class TrackerLog(ScalarLog):
    """Collects the scalars of a call, without those "vs samples", and sends them together."""

    def __init__(self, service: str, tracker: Tracker, choices: TagChoices) -> None:
        super().__init__(self._collect, choices, close=self._end)
        self._service, self._tracker = service, tracker
        self._points: list[Point] = []
        self._failed = False

    def _collect(self, tag: str, value: float, step: int) -> None:
        if not tag.endswith(VS_SAMPLES):
            self._points.append((tag, float(value), step))

    def steps(self, steps: Sequence[StepRecord], speed: Speed) -> None:
        """Sends the scalars of iterations."""
        super().steps(steps, speed)
        self._send()

    def validation(self, record: ValidationRecord) -> None:
        """Sends the losses of an evaluation."""
        super().validation(record)
        self._send()

    def _send(self) -> None:
        points, self._points = self._points, []
        if points and not self._failed:
            with self._surviving("points are dropped from here on"):
                self._tracker.send(points)

    def _end(self) -> None:
        with self._surviving("the last points may be missing there"):
            self._tracker.close()

    @contextlib.contextmanager
    def _surviving(self, result: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each package raises errors of its own
            self._failed = True
            print(f"warning: --log-to {self._service}: {_sentence(error)}; {result}", flush=True)


def tracker_log(service: str, facts: RunFacts, choices: TagChoices) -> TrackerLog:
    """Returns the writer of a value of --log-to. Raises UserError if a package is missing or the service refuses."""
    openers: dict[str, Callable[[RunFacts], Tracker]] = {
        "mlflow": _open_mlflow,
        "comet": _open_comet,
        "opentelemetry": _open_opentelemetry,
    }
    try:
        if service.startswith(PROMETHEUS):
            tracker = _open_textfile(Path(service.removeprefix(PROMETHEUS)))
        else:
            tracker = openers[service](facts)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--log-to {service}: {_sentence(error)}") from error
    return TrackerLog(service, tracker, choices)


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _load(service: str, module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"--log-to {service} needs a package: pip install {package}, or drop the flag") from None


def _open_mlflow(facts: RunFacts) -> Tracker:
    """MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where; MLFLOW_RUN_ID continues a run."""
    # By itself MLflow would ask a server that does not answer for minutes, before the first step.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    mlflow = _load("mlflow", "mlflow", "mlflow-skinny")
    client, id_file = mlflow.MlflowClient(), facts.folder and facts.folder / "mlflow_run_id.txt"
    known = kept_run_id(id_file, facts.resumed, "MLFLOW_RUN_ID") or os.environ.get("MLFLOW_RUN_ID")
    run = mlflow.start_run(run_id=known, run_name=None if known else facts.name).info.run_id
    keep_run_id(id_file, run, "MLflow")
    if known is None:
        entries = [mlflow.entities.Param(key, value[:500]) for key, value in facts.flags.items()]
        for first in range(0, len(entries), 100):  # the most that a request may have
            client.log_batch(run, params=entries[first : first + 100])

    def send(points: Sequence[Point]) -> None:
        now = int(time.time() * 1000)
        metrics = [mlflow.entities.Metric(tag, value, now, step) for tag, value, step in points]
        for first in range(0, len(metrics), 1000):
            client.log_batch(run, metrics=metrics[first : first + 1000], synchronous=False)

    return Tracker(send, mlflow.end_run)


def _open_comet(facts: RunFacts) -> Tracker:
    """COMET_API_KEY and COMET_PROJECT_NAME say where; COMET_START_ONLINE=0 keeps the points in a file in
    COMET_OFFLINE_DIRECTORY."""
    comet = _load("comet", "comet_ml", "comet-ml")
    id_file = facts.folder and facts.folder / "comet_experiment_key.txt"
    known = kept_run_id(id_file, facts.resumed, "COMET_EXPERIMENT_KEY")
    settings = comet.ExperimentConfig(
        name=facts.name,
        log_code=False,
        log_git_patch=False,
        auto_metric_logging=False,
        display_summary_level=0,  # it lists all flags after the run's last lines
    )
    experiment = comet.start(experiment_key=known, experiment_config=settings)
    keep_run_id(id_file, experiment.get_key(), "Comet")
    experiment.log_parameters(dict(facts.flags))

    def send(points: Sequence[Point]) -> None:
        for tag, value, step in points:
            experiment.log_metric(tag, value, step=step)

    return Tracker(send, experiment.end)


def _open_opentelemetry(facts: RunFacts) -> Tracker:
    """OTEL_EXPORTER_OTLP_ENDPOINT says where, OTEL_METRIC_EXPORT_INTERVAL how often. A gauge has its newest value."""
    package = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
    metrics = _load("opentelemetry", "opentelemetry.sdk.metrics", package)
    export = _load("opentelemetry", "opentelemetry.sdk.metrics.export", package)
    otlp = _load("opentelemetry", "opentelemetry.exporter.otlp.proto.http.metric_exporter", package)
    reader = export.PeriodicExportingMetricReader(otlp.OTLPMetricExporter())
    provider = metrics.MeterProvider([reader], shutdown_on_exit=False)
    meter = provider.get_meter("megatron")
    gauges: dict[str, Any] = {}
    attributes = {} if facts.name is None else {"run": facts.name}

    def send(points: Sequence[Point]) -> None:
        for tag, value in _newest(points).items():
            name = f"megatron.{re.sub(r'[^A-Za-z0-9_./-]', '_', tag)}"
            gauges[name] = gauges.get(name) or meter.create_gauge(name)
            gauges[name].set(value, attributes)

    return Tracker(send, provider.shutdown)


def _open_textfile(path: Path) -> Tracker:
    """For the textfile collector of Prometheus' node exporter, which reads files that end in .prom. The file has the
    newest value of each tag."""
    values: dict[str, float] = {}

    def send(points: Sequence[Point]) -> None:
        values.update(_newest(points))
        lines = []
        for tag, value in values.items():
            name = f"megatron_{re.sub('[^A-Za-z0-9_]', '_', tag)}"
            text = (
                "NaN" if math.isnan(value) else "+Inf" if value == math.inf else "-Inf" if value == -math.inf else value
            )
            lines.append(f"# TYPE {name} gauge\n{name} {text}\n")
        write_atomically(path, "".join(lines).encode())

    try:
        write_atomically(path, b"")
    except OSError as error:
        raise UserError(f"--log-to {PROMETHEUS}{path}: cannot be written: {error.strerror or error}") from error
    return Tracker(send, lambda: None)


def _newest(points: Sequence[Point]) -> dict[str, float]:
    return {tag: value for tag, value, _ in points} | {"iteration": float(max(step for _, _, step in points))}
