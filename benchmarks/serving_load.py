"""Clients that ask a server of tools/serve.py for texts without a pause, for some minutes.

python tools/serve.py --load runs/quickstart/checkpoints &
python benchmarks/serving_load.py --url http://127.0.0.1:8000 --clients 32 --seconds 600 --pid $!

prints tokens per second, errors, latencies, and the server's memory after the first tenth and at the end. With --hf-dir
it then measures `generate` of transformers with the same prompts in batches of --clients, for a tenth of the time.
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

_WORDS = ("the", "model", "reads", "a", "text", "and", "writes", "what", "may", "come", "next", "after", "it")


@dataclass
class Tally:
    """What the clients have counted."""

    texts: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Seconds to the first token, of streams."""
    lock: threading.Lock = field(default_factory=threading.Lock)


def prompt_of(chance: random.Random, longest: int = 24) -> str:
    """Returns a prompt of some words."""
    return " ".join(chance.choices(_WORDS, k=chance.randint(1, longest)))


def ask(client: http.client.HTTPConnection, body: dict[str, object], tally: Tally) -> None:
    """Asks for one text and counts it."""
    began = time.monotonic()
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = client.getresponse()
    first = None
    if answer.status != 200:
        raise ValueError(json.loads(answer.read())["error"]["message"])
    if body.get("stream"):
        usage: dict[str, int] = {}
        for line in answer:
            first = first or time.monotonic() - began
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                usage = event.get("usage") or usage
    else:
        usage = json.loads(answer.read())["usage"]
    with tally.lock:
        tally.texts += 1
        tally.tokens += usage["completion_tokens"]
        tally.seconds.append(time.monotonic() - began)
        if first is not None:
            tally.first.append(first)


def run_client(number: int, url: str, deadline: float, new_tokens: int, tally: Tally) -> None:
    """Asks again and again until the deadline. Every other text is a stream."""
    chance, place = random.Random(number), urlsplit(url)
    assert place.hostname is not None
    client = http.client.HTTPConnection(place.hostname, place.port or 80, timeout=300)
    while time.monotonic() < deadline:
        count = chance.randint(max(1, new_tokens // 2), new_tokens)
        body: dict[str, object] = {"prompt": prompt_of(chance), "max_tokens": count, "ignore_eos": True}
        body |= {"temperature": chance.choice([0, 0.8]), "stream": bool(chance.randint(0, 1))}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        try:
            ask(client, body, tally)
        except (OSError, ValueError, http.client.HTTPException) as error:
            client.close()
            with tally.lock:
                tally.errors.append(f"{type(error).__name__}: {error}")


def resident_mib(pid: int | None) -> float | None:
    """Returns the memory of a process, in MiB; None if it is not known."""
    path = Path(f"/proc/{pid}/status")
    if pid is None or not path.exists():
        return None
    return next(int(line.split()[1]) / 1024 for line in path.read_text().splitlines() if line.startswith("VmRSS"))


def load_server(url: str, clients: int, seconds: float, new_tokens: int, pid: int | None) -> tuple[Tally, float]:
    """Lets the clients ask for some time; prints the memory of the server. Returns the counts and the seconds."""
    tally, began = Tally(), time.monotonic()
    deadline = began + seconds
    threads = [
        threading.Thread(target=run_client, args=(number, url, deadline, new_tokens, tally))
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 10)
    early = resident_mib(pid)
    for thread in threads:
        thread.join()
    late = resident_mib(pid)
    if early is not None and late is not None:
        print(f"memory of the server: {early:.0f} MiB after a tenth of the time, {late:.0f} MiB at the end")
    return tally, time.monotonic() - began


def transformers_speed(folder: str, clients: int, seconds: float, new_tokens: int) -> float:
    """Returns the tokens per second of `generate` with batches of as many prompts as there were clients."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    chance, written, began = random.Random(0), 0, time.monotonic()
    while time.monotonic() - began < seconds:
        batch = tokenizer([prompt_of(chance) for _ in range(clients)], return_tensors="pt", padding=True)
        batch = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        count = chance.randint(max(1, new_tokens // 2), new_tokens)
        model.generate(**batch, max_new_tokens=count, min_new_tokens=count, do_sample=True, temperature=0.8)
        written += clients * count
    return written / (time.monotonic() - began)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program. Returns 1 if any text failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--new-tokens", type=int, default=64, help="longest text; the shortest is half as long")
    parser.add_argument("--pid", type=int, help="process of the server, whose memory is watched")
    parser.add_argument("--hf-dir", help="the same model as a Hugging Face folder")
    args = parser.parse_args(argv)
    tally, seconds = load_server(args.url, args.clients, args.seconds, args.new_tokens, args.pid)
    rate = tally.tokens / seconds
    counted = f"{tally.texts} texts, {rate:.1f} tokens/s, {len(tally.errors)} errors"
    print(f"{args.clients} clients, {seconds:.0f} s: {counted}")
    for name, values in (("whole texts", tally.seconds), ("first tokens of streams", tally.first)):
        if len(values) > 1:
            late = statistics.quantiles(values, n=100)[98]
            print(f"{name}: median {statistics.median(values):.3f} s, 99% within {late:.3f} s")
    for error in sorted(set(tally.errors))[:10]:
        print(f"  {error}", file=sys.stderr)
    if args.hf_dir:
        found = transformers_speed(args.hf_dir, args.clients, args.seconds / 10, args.new_tokens)
        print(f"generate of transformers, batches of {args.clients}: {found:.1f} tokens/s")
    return 1 if tally.errors or not tally.texts else 0


if __name__ == "__main__":
    sys.exit(main())
