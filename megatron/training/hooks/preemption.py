"""--preemption-notice: asks a cloud whether this machine is about to be taken away, and saves in time.

AWS says it two minutes before (EC2 user guide, "Spot Instance interruption notices"), Google Cloud half a minute
(Compute Engine, "Preemptible VM instances"), Azure half a minute or more ("Scheduled Events"). The first rank of each
host asks every few seconds. A notice acts as a signal does: all ranks save after the same step, and exit with 0.
"""

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from megatron.training.hooks.hook import Hook

SECONDS = 5.0
"""Between two questions."""
_TIMEOUT = 2.0


def _ask(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    """Returns the answer of a metadata service. Raises OSError (`urllib.error.HTTPError` for its refusals)."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the service is on this machine's own link
    with direct.open(request, timeout=_TIMEOUT) as answer:
        return str(answer.read(1 << 16).decode("utf-8", "replace"))


def _aws() -> str | None:
    root = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token = _ask(f"{root}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    try:
        return _ask(f"{root}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except urllib.error.HTTPError as error:
        if error.code == 404:  # nothing is planned
            return None
        raise


def _gcp() -> str | None:
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    answer = _ask(f"http://{host}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return "the instance is preempted" if answer.strip() == "TRUE" else None


def _azure() -> str | None:
    root = os.environ.get("AZURE_METADATA_ENDPOINT", "http://169.254.169.254").rstrip("/")
    answer = json.loads(_ask(f"{root}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}))
    ends = [event for event in answer.get("Events", []) if event.get("EventType") in ("Preempt", "Terminate")]
    return f"{ends[0]['EventType']}, not before {ends[0].get('NotBefore') or 'now'}" if ends else None


SERVICES: Mapping[str, Callable[[], str | None]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
"""Functions that return a notice, or None if there is none. They raise OSError or ValueError if they get no answer."""


class PreemptionNotice(Hook):
    """Asks the service of a cloud while the run trains. After a notice this process gets `number`, the signal that lets
    all ranks save and exit. A service that does not answer is told once, and asked further."""

    def __init__(self, cloud: str, number: int) -> None:
        self.cloud, self.number = cloud, number
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, iteration: int) -> None:
        """Starts to ask."""
        self._thread = threading.Thread(target=self._watch, name="preemption-notice", daemon=True)
        self._thread.start()

    def on_exit(self, iteration: int) -> None:
        """Ends the questions."""
        self._over.set()

    def _watch(self) -> None:
        told = False
        while not self._over.is_set():
            try:
                notice = SERVICES[self.cloud]()
            except (OSError, ValueError) as error:
                if not told:
                    self._say(f"WARNING: --preemption-notice {self.cloud}: no answer ({error}); asked again every 5 s")
                notice, told = None, True
            if notice is not None:
                self._say(f"--preemption-notice {self.cloud}: {notice}; the run saves and ends")
                os.kill(os.getpid(), self.number)
                return
            self._over.wait(SECONDS)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
