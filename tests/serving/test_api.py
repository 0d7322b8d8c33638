"""Real clients of a server: texts alone and together, streams, refusals, and clients that leave."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.served import Served, served

from megatron.core.inference.generation import generate
from megatron.core.inference.sampling import GREEDY, SamplingParams
from megatron.serving.api import ApiLimits
from megatron.serving.http_server import HttpLimits


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with served() as found:
        yield found


def ask(server: Served, path: str, body: object = None, **headers: str) -> tuple[int, dict, dict]:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    client.request("GET" if body is None else "POST", path, data, headers)
    answer = client.getresponse()
    return answer.status, json.loads(answer.read()), dict(answer.getheaders())


def complete(server: Served, prompt: object, **fields: object) -> dict:
    status, found, _ = ask(server, "/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})
    assert status == 200, found
    return found


def text_of(ids: list[int]) -> str:
    return "".join(f" {i}" for i in ids)


def expected(server: Served, prompt: list[int], count: int = 8, sampling: SamplingParams = GREEDY, **more) -> str:
    return text_of(generate(server.model, [prompt], count, sampling, **more)[0])


def test_texts_are_those_of_generate(small: Served) -> None:
    found = complete(small, "3 7 1")
    assert found["object"] == "text_completion" and found["model"] == "small"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    (choice,) = found["choices"]
    assert choice == {"index": 0, "text": expected(small, [3, 7, 1]), "logprobs": None, "finish_reason": "length"}
    assert complete(small, [3, 7, 1])["choices"] == found["choices"]
    several = complete(small, ["5", "6 6"], n=2)["choices"]
    texts = [expected(small, [5]), expected(small, [6, 6])]
    assert [each["text"] for each in several] == [texts[0], texts[0], texts[1], texts[1]]
    sampled = complete(small, "5", n=3, temperature=1.3, seed=7)["choices"]
    rows = [expected(small, [5], sampling=SamplingParams(1.3, seed=7), first_sequence=row) for row in range(3)]
    assert [each["text"] for each in sampled] == rows and len(set(rows)) > 1


def test_many_clients_at_once(small: Served) -> None:
    prompts = [[number % 36, number * 7 % 36, 3][: 1 + number % 3] for number in range(10)]
    alone = [expected(small, prompt, 4 + number % 5) for number, prompt in enumerate(prompts)]

    def one(number: int) -> str:
        fields = {"max_tokens": 4 + number % 5}
        return complete(small, prompts[number], **fields)["choices"][0]["text"]

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(one, range(10))) == alone
    assert small.engine.num_used_pages == 0


def events(server: Served, path: str, body: dict) -> list[dict]:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    client.request("POST", path, json.dumps({"stream": True, **body}))
    answer = client.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"
    *parts, last, end = answer.read().decode().split("\n\n")
    assert last == "data: [DONE]" and end == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_stream_joins_to_the_text(small: Served) -> None:
    body = {"prompt": "3 7 1", "temperature": 0, "max_tokens": 8, "n": 2, "stream_options": {"include_usage": True}}
    *parts, usage = events(small, "/v1/completions", body)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 16
    for number in range(2):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == number]
        assert "".join(part["text"] for part in mine) == expected(small, [3, 7, 1]) and len(mine) > 4
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"]
    assert len({part["id"] for part in (*parts, usage)}) == 1


def test_log_probabilities_and_echo(small: Served) -> None:
    found = complete(small, "3 7 1", logprobs=2, echo=True)["choices"][0]
    text = "3 7 1" + expected(small, [3, 7, 1])
    assert found["text"] == text
    logprobs = found["logprobs"]
    ids = [int(word) for word in text.split()]
    assert [int(token) for token in logprobs["tokens"]] == ids
    places = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    assert all(text[at:].strip().startswith(token) for at, token in places)
    logs = small.model(torch.tensor([ids])).detach().log_softmax(-1)[0]
    assert logprobs["token_logprobs"][0] is None
    values = [float(logs[at, ids[at + 1]]) for at in range(10)]
    assert logprobs["token_logprobs"][1:] == pytest.approx(values, abs=1e-10)
    assert all(len(best) == 2 for best in logprobs["top_logprobs"][1:])
    parts = events(small, "/v1/completions", {"prompt": "3 7 1", "temperature": 0, "max_tokens": 8, "logprobs": 0})
    tokens = [
        token for part in parts if part["choices"][0]["logprobs"] for token in part["choices"][0]["logprobs"]["tokens"]
    ]
    assert tokens == logprobs["tokens"][3:]
    scored = complete(small, "3 7 1", logprobs=0, echo=True, max_tokens=0)["choices"][0]
    assert scored["text"] == "3 7 1" and scored["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:3]


def test_stop_strings_end_a_text(small: Served) -> None:
    free = expected(small, [3, 7, 1])
    stop = " " + free.split()[3]
    found = complete(small, "3 7 1", stop=[stop, "zzz"], logprobs=0)["choices"][0]
    assert found["text"] == free[: free.index(stop)] and found["finish_reason"] == "stop"
    assert len(found["logprobs"]["tokens"]) == len(found["text"].split())


def test_refusals_have_one_form(small: Served) -> None:
    cases = [
        ("/v1/completions", b"{", 400, "not JSON"),
        ("/v1/completions", {"prompt": [1] * 30}, 400, "room for 24 together; shorten it to at most 23"),
        ("/v1/completions", {"prompt": "1 2", "max_tokens": 23}, 400, "max_tokens 22 works"),
        ("/v1/completions", {"prompt": "1", "n": 21}, 400, "21 texts in one request, and the limit is 20"),
        ("/v1/chat/completions", {"messages": []}, 400, "does not chat: it has no template"),
        ("/v1/embeddings", {}, 404, "embedding models are not served"),
        ("/v1/rerank", {}, 404, "reranking models are not served"),
        ("/nothing", {}, 404, "there is no /nothing; there are /, /health"),
        ("/v1/models/other", None, 404, "'other' is not served here; 'small' is"),
        ("/v1/completions", None, 405, "takes POST, not GET"),
    ]
    for path, body, status, message in cases:
        found = ask(small, path, body)
        assert found[0] == status and message in found[1]["error"]["message"], found
        assert set(found[1]["error"]) == {"message", "type", "param", "code"}
    assert complete(small, "5")["choices"][0]["text"] == expected(small, [5])


def test_pages_of_other_sites_are_refused(small: Served) -> None:
    body, own = {"prompt": "1", "max_tokens": 1}, f"127.0.0.1:{small.port}"
    assert ask(small, "/v1/completions", body, Origin="http://evil.example")[0] == 403
    assert ask(small, "/v1/completions", body, Host="evil.example")[0] == 403
    assert ask(small, "/v1/completions", body, Origin=f"http://{own}", Host=own)[0] == 200


def test_models_health_metrics(small: Served) -> None:
    assert ask(small, "/v1/models")[1]["data"][0]["id"] == ask(small, "/v1/models/small")[1]["id"] == "small"
    assert ask(small, "/health")[:2] == (200, {"status": "ok"})
    before = small.api.metrics.value("generated_tokens_total")
    complete(small, "5")
    assert small.api.metrics.value("generated_tokens_total") == before + 8
    client = http.client.HTTPConnection("127.0.0.1", small.port, timeout=60)
    client.request("GET", "/metrics")
    text = client.getresponse().read().decode()
    assert 'megatron_serving_requests_total{path="/v1/completions",status="200"}' in text
    assert "megatron_serving_pages 59" in text and "megatron_serving_used_pages 0" in text


def until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(small: Served, stream: bool) -> None:
    hold, steps = threading.Event(), []
    step = small.engine.step
    small.engine.step = lambda: (hold.wait(0.05), step(), steps.append(1))
    abandoned = small.api.metrics.value("abandoned_requests_total")
    try:
        body = json.dumps({"prompt": "1", "max_tokens": 22, "n": 3, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", small.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            until(lambda: small.engine.num_used_pages)
        until(lambda: not small.engine.num_used_pages and not small.engine.has_work)
        assert small.api.metrics.value("abandoned_requests_total") == abandoned + 1
        assert len(steps) < 20, "the texts were written to their ends"
    finally:
        hold.set()
        small.engine.step = step
    assert complete(small, "5")["choices"][0]["text"] == expected(small, [5])


def test_limits_of_texts_and_time() -> None:
    body = {"prompt": "1", "max_tokens": 20, "temperature": 0}
    with served(limits=ApiLimits(2, 60.0)) as server, ThreadPoolExecutor(2) as pool:
        step, go_on = server.engine.step, threading.Event()
        server.engine.step = lambda: (go_on.wait(60), step())
        held = [pool.submit(ask, server, "/v1/completions", body) for _ in range(2)]
        until(lambda: server.api._open_texts == 2)
        status, _, headers = ask(server, "/v1/completions", body)
        go_on.set()
        assert (status, headers["Retry-After"]) == (429, "1")
        assert [answer.result()[0] for answer in held] == [200, 200]
        server.engine.step, server.api.limits = lambda: (time.sleep(0.05), step()), ApiLimits(2, 0.4)
        status, late, _ = ask(server, "/v1/completions", body)
        assert status == 504 and "not finished in 0.4 seconds" in late["error"]["message"]
        until(lambda: not server.engine.num_used_pages)
        server.engine.step, server.api.limits = step, ApiLimits(2, 60.0)
        assert complete(server, "5")["choices"][0]["text"] == expected(server, [5])


def test_keys() -> None:
    with served(api_key="secret") as server:
        body = {"prompt": "1", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secretive"}):
            status, found, sent = ask(server, "/v1/completions", body, **headers)
            assert status == 401 and found["error"]["code"] == "invalid_api_key" and sent["WWW-Authenticate"]
        assert ask(server, "/v1/completions", body, Authorization="Bearer secret", Host="any.example")[0] == 200
        assert ask(server, "/metrics")[0] == 401 and ask(server, "/health")[0] == 200


def test_a_failed_engine_is_told() -> None:
    with served() as server:
        server.engine.step = lambda: 1 / 0
        status, found, _ = ask(server, "/v1/completions", {"prompt": "1", "max_tokens": 5})
        assert status == 503 and found["error"]["message"] == "the server failed: ZeroDivisionError"
        assert ask(server, "/health")[0] == 503
        assert ask(server, "/v1/completions", {"prompt": "1", "max_tokens": 5})[0] == 503


def test_a_lack_of_memory_ends_texts_and_not_the_server() -> None:
    with served() as server:
        step = server.engine.step

        def fails() -> None:
            server.engine.step = step
            server.engine._read_inbox()
            server.engine._admit()
            raise torch.OutOfMemoryError("no memory")

        server.engine.step = fails
        status, found, _ = ask(server, "/v1/completions", {"prompt": "1", "max_tokens": 5})
        assert status == 503 and "no memory left" in found["error"]["message"]
        assert complete(server, "5")["choices"][0]["text"] == expected(server, [5])


def test_a_body_that_is_too_large() -> None:
    with served(http=HttpLimits(body_bytes=1000)) as server:
        status, found, _ = ask(server, "/v1/completions", {"prompt": "1 " * 1000})
        assert status == 413 and found["error"]["code"] == "body_too_large"


@pytest.mark.slow
def test_the_client_of_openai(small: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["small"]
    options = {"model": "small", "prompt": "3 7 1", "temperature": 0, "max_tokens": 8}
    found = client.completions.create(**options, logprobs=1, n=2)
    assert [choice.text for choice in found.choices] == [expected(small, [3, 7, 1])] * 2
    assert found.usage.total_tokens == 19 and len(found.choices[1].logprobs.tokens) == 8
    pieces = [part.choices[0].text for part in client.completions.create(**options, stream=True)]
    assert "".join(pieces) == expected(small, [3, 7, 1])
    with pytest.raises(openai.BadRequestError, match="max_tokens 21 works"):
        client.completions.create(**{**options, "max_tokens": 100})
    with pytest.raises(openai.NotFoundError, match="embedding models are not served"):
        client.embeddings.create(model="small", input="a")
