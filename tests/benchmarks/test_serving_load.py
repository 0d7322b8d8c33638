"""The clients of the load test count texts, and notice failures."""

import random

import pytest
from support.served import served

from benchmarks import serving_load
from megatron.serving.api import ApiLimits


def test_counts_and_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(serving_load, "prompt_of", lambda chance: str(random.Random(0).randint(0, 35)))
    with served() as server:
        words = ["--url", server.url, "--clients", "3", "--seconds", "0.5", "--new-tokens", "6"]
        assert serving_load.main(words) == 0
        out = capsys.readouterr().out
        assert f"{int(server.api.metrics.value('first_token_seconds_count'))} texts" in out and ", 0 errors" in out
        server.api.limits = ApiLimits(0, 1.0)
        assert serving_load.main(words) == 1
        assert "1 texts in one request, and the limit is 0" in capsys.readouterr().err
