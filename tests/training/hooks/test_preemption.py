"""Notices of clouds, from a stand-in of their metadata services: a run saves and ends at once."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runs import TINY, train

from megatron.training.hooks import preemption
from megatron.training.hooks.exit import ExitReason

STOP = '{"action": "stop"}'
EVENT = json.dumps({"Events": [{"EventType": "Freeze"}, {"EventType": "Preempt", "NotBefore": "soon"}]})
ANSWERS = {  # by cloud: path, answers without and with a notice (status, text), header that the service asks for
    "aws": (
        "/latest/meta-data/spot/instance-action",
        (404, ""),
        (200, '{"action": "stop"}'),
        "X-aws-ec2-metadata-token",
    ),
    "gcp": ("/computeMetadata/v1/instance/preempted", (200, "FALSE"), (200, "TRUE"), "Metadata-Flavor"),
    "azure": ("/metadata/scheduledevents?api-version=2020-07-01", (200, '{"Events": []}'), (200, EVENT), "Metadata"),
}


class Service(http.server.ThreadingHTTPServer):
    """Answers like a cloud's service. `left` questions are answered before there is a notice."""

    cloud, left = "", 10**9


class Handler(http.server.BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200 if known else 400, "secret")

    def do_GET(self) -> None:
        path, nothing, notice, header = ANSWERS[self.server.cloud]
        token = self.headers[header]
        if self.path != path or token is None or (self.server.cloud == "aws" and token != "secret"):
            self._answer(401, "")
            return
        self.server.left -= 1
        self._answer(*(nothing if self.server.left >= 0 else notice))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=ANSWERS)
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with Service(("127.0.0.1", 0), Handler) as server:
        server.cloud = request.param
        address = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{address}/")
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        monkeypatch.setenv("AZURE_METADATA_ENDPOINT", f"http://{address}")
        monkeypatch.setattr(preemption, "SECONDS", 0.01)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_notice_is_told_from_none(service: Service) -> None:
    service.left = 2
    answers = [preemption.SERVICES[service.cloud]() for _ in range(3)]
    assert answers[:2] == [None, None] and answers[2]


@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_a_run_saves_and_ends(service: Service, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    service.left = 3
    flags = f"{TINY} --mock-data --train-iters 100000 --save {tmp_path} --preemption-notice aws"
    outcome = train(flags)
    done = len(outcome.steps)
    assert outcome.decision is not None and outcome.decision.reason is ExitReason.SIGNAL
    assert [path.name for path in tmp_path.glob("iter_*")] == [f"iter_{done:07d}"] and done < 100000
    assert '--preemption-notice aws: {"action": "stop"}; the run saves and ends' in capfd.readouterr().err


@pytest.mark.parametrize("service", ["gcp"], indirect=True)
def test_a_service_that_does_not_answer_is_told_once(
    service: Service, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    notice = preemption.PreemptionNotice("gcp", 0)
    notice.on_start(0)
    assert notice._thread is not None
    while not capfd.readouterr().err.count("no answer"):
        pass
    for _ in range(20):
        notice._over.wait(0.01)
    notice.on_exit(0)
    notice._thread.join()
    assert "no answer" not in capfd.readouterr().err
