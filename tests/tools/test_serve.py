"""tools/serve.py: as a program, with real clients, in every layout; start messages, signals, and what is wrong."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.generating_models import build
from support.programs import python
from support.saved_models import save_random_model

from megatron.core.exceptions import UserError
from megatron.core.inference.layout_forward import LayoutForward
from megatron.serving.config import ServeConfig
from megatron.serving.serve import build_cache, decoding_graphs
from tools import generate, serve

ROOT = Path(__file__).parents[2]
HF = ROOT / "tests/data/golden/corpus/hf"
MODEL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--position-embedding-type", "rope"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "2", "--fp64"),
    *("--train-iters", "3", "--lr", "1e-3", "--mock-data", "--qk-layernorm", "--disable-bias-linear"),
    *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(HF)),
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("talker", numbered=False) / "checkpoints"
    save_random_model(root, MODEL)
    (root.parent / "chat.jinja").write_text(TEMPLATE)
    return root


@contextlib.contextmanager
def program(checkpoints: Path, *flags: str, ranks: int = 1, env=None) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server and its address. It must end with code 0 after SIGTERM; torchrun itself ends with 1 then."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [python(), *launcher, str(ROOT / "tools/serve.py"), "--load", str(checkpoints), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}) as process:
        lines = []
        try:
            for line in process.stderr:
                lines.append(line)
                if found := re.match(r"serving on (http://\S+?),?(\s|$)", line):
                    yield process, found[1]
                    break
            else:
                raise AssertionError("".join(lines))
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(60) == (1 if ranks > 1 else 0), rest
            assert "stopping" in rest and (ranks > 1 or "Traceback" not in rest)
        finally:
            process.kill()


def post(url: str, body: dict, path: str = "/v1/completions") -> dict:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def texts_of_tool(capsys: pytest.CaptureFixture, checkpoints: Path, prompts: list[str], count: int) -> list[str]:
    """What tools/generate.py writes, one run for each prompt: texts may have line breaks."""
    found = []
    for prompt in prompts:
        words = ["--load", str(checkpoints), "--prompt", prompt, "--max-new-tokens", str(count), "--no-echo"]
        assert generate.main(words) == 0
        found.append(capsys.readouterr().out.removesuffix("\n"))
    return found


PROMPTS = ["The ", "What is it", "a", "Once upon a time"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [[], ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]], ids=["1", "tp", "pp"]
)
def test_32_clients_get_the_texts_of_single_runs(
    flags: list[str], checkpoints: Path, capsys: pytest.CaptureFixture
) -> None:
    alone = texts_of_tool(capsys, checkpoints, PROMPTS, 12)
    assert len(set(alone)) == 4
    with program(checkpoints, *flags, ranks=2 if flags else 1) as (_, url), ThreadPoolExecutor(32) as pool:
        bodies = [{"prompt": PROMPTS[number % 4], "max_tokens": 12, "temperature": 0} for number in range(64)]
        found = list(pool.map(lambda body: post(url, body)["choices"][0]["text"], bodies))
        assert found == [alone[number % 4] for number in range(64)]
        if flags:
            time.sleep(5)  # the other rank waits, and hears now and then that there is nothing to do
            assert post(url, bodies[0])["choices"][0]["text"] == alone[0]


@pytest.mark.slow
def test_chats_and_keys(checkpoints: Path) -> None:
    key = checkpoints.parent / "key"
    key.write_text("secret\n")
    flags = ("--chat-template", str(checkpoints.parent / "chat.jinja"), "--api-key-file", str(key))
    with program(checkpoints, *flags) as (_, url):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(url, body, "/v1/chat/completions")
        openai = pytest.importorskip("openai")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        assert client.models.list().data[0].id == "talker"
        whole = client.chat.completions.create(model="talker", **body, logprobs=True, top_logprobs=2)
        message = whole.choices[0].message
        assert message.role == "assistant" and len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        parts = list(client.chat.completions.create(model="talker", **body, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == message.content
        assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason == "length"


@pytest.mark.slow
def test_a_signal_lets_an_open_answer_finish(checkpoints: Path) -> None:
    with program(checkpoints, "--shutdown-seconds", "60") as (process, url), ThreadPoolExecutor(1) as pool:
        post(url, {"prompt": "a", "max_tokens": 1})
        slow = pool.submit(post, url, {"prompt": ["a"] * 16, "max_tokens": 60, "temperature": 0})
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert len(slow.result()["choices"]) == 16


def run(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str]:
    code = serve.main([str(word) for word in words])
    return code, capsys.readouterr().err


def test_a_dry_run_tells_the_size_of_the_cache(checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    code, err = run(capsys, "--load", checkpoints, "--dry-run", "--cache-gib", "0.001")
    # 2 layers x keys and values x 32 channels x 8 bytes a token
    assert code == 0 and "for 1,024 tokens in 64 pages of 16 (1.0 KiB for a token); 32 texts at once" in err
    assert "each of up to 64 tokens" in err and "serving on" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: --load is required"),
        (["--load", "nowhere"], "error: --load nowhere: no such folder"),
        (["--load", "x", "--host", "0.0.0.0"], "add --api-key-file FILE"),
        (["--load", "x", "--tensor-model-parallel-size", "2"], "--nproc_per_node 2"),
        (["--load", "x", "--api-key-file", "none"], "--api-key-file none"),
        (["--load", "CHECKPOINTS", "--cache-gib", "1e-6"], "--cache-gib 1e-06: 0.000 GiB have no room for a page"),
        (["--load", "CHECKPOINTS", "--chat-template", "none"], "--chat-template none"),
    ],
)
def test_mistakes_are_named(words: list, message: str, checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    code, err = run(capsys, *(checkpoints if word == "CHECKPOINTS" else word for word in words))
    assert code == 2 and message in err


def test_a_port_that_is_taken(checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, err = run(capsys, "--load", checkpoints, "--port", port)
    assert code == 2 and f"--port {port}: " in err and "0 for a free one" in err


def test_graphs_that_this_machine_cannot_compute_are_named(capsys: pytest.CaptureFixture) -> None:
    forward, config = LayoutForward(build({}, {"position_embedding_type": "rope"})), ServeConfig(decoding_graphs=True)
    context = build_cache(forward, None, 64, config, lambda sentence: None)
    assert decoding_graphs(forward, context, None, config) is None
    assert "--decoding-graphs has no effect on a CPU: one GPU computes graphs" in capsys.readouterr().err


def test_a_cache_that_is_shorter_than_the_longest_text() -> None:
    told: list[str] = []
    forward = LayoutForward(build({}, {"position_embedding_type": "rope"}))
    config = ServeConfig(cache_gib=10_000 / 2**30, page_size=2, max_texts=3)
    context = build_cache(forward, None, 24, config, told.append)
    per_token = 3 * 2 * 16 * 8
    assert context.num_pages == 10_000 // (2 * per_token) == 6 and context.max_sequence_length == 10
    assert "for 10 tokens in 5 pages of 2" in told[0] and "the longest text that fits has 10 tokens" in told[1]
    with pytest.raises(UserError, match="have no room for a page of 2 tokens beside the states of --max-texts 3"):
        build_cache(forward, None, 24, ServeConfig(cache_gib=1000 / 2**30, page_size=2, max_texts=3), told.append)
