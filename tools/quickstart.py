"""From real text to a trained GPT in one command: make quickstart, or python tools/quickstart.py [--corpus FILE.jsonl]

Takes the sources of Python's standard library, which every machine has, or your own text. Trains a byte-level BPE
tokenizer, preprocesses the text, trains a small GPT with two data parallel processes (one per GPU, if there are GPUs),
stops it half-way, resumes it from its checkpoint, and writes metrics.jsonl, loss.png, checkpoints/, sample.txt and
summary.json to runs/quickstart/. On two cores this takes about five minutes.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes  # noqa: E402

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron.core.exceptions import UserError  # noqa: E402
from megatron.core.utils.files import open_atomically, write_atomically  # noqa: E402
from megatron.data.datasets.indexed_dataset import IndexedDataset  # noqa: E402
from megatron.programs import entry_script  # noqa: E402
from megatron.training.trained_model import load_trained_model  # noqa: E402
from pretrain_gpt import build_model  # noqa: E402

HELD_OUT_BYTES = 400_000
LONGEST_FILE = 400_000


@dataclass(frozen=True)
class Recipe:
    """Sizes of the run, chosen so that two cores finish in about five minutes."""

    vocab_size: int = 2048
    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    seq_length: int = 256
    micro_batch_size: int = 4
    global_batch_size: int = 8
    tokens: int = 1_700_000
    learning_rate: float = 4e-3
    tokenizer_bytes: int = 8_000_000
    bytes_per_token: float = 3.1
    """Slightly more than the tokenizer achieves, so that there is enough text for the whole run."""

    @property
    def training_bytes(self) -> int:
        """Bytes of text for about one epoch. The bigram table is fitted on the same tokens as the model."""
        return int(self.tokens * self.bytes_per_token)

    @property
    def iterations(self) -> int:
        """Training steps."""
        return max(4, self.tokens // (self.global_batch_size * self.seq_length))


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="a .jsonl file with a key `text` (default: sources of Python)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/quickstart"), help="folder to write to; it is deleted first"
    )
    tokens = int(os.environ.get("QUICKSTART_TOKENS", Recipe.tokens))
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens to train on (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        run_quickstart(arguments.corpus, arguments.output, Recipe(tokens=arguments.tokens))
    except subprocess.CalledProcessError as error:
        print(f"error: this step failed (exit code {error.returncode}): {' '.join(error.cmd)}", file=sys.stderr)
        return 1
    return 0


def run_quickstart(corpus: Path | None, output: Path, recipe: Recipe) -> None:
    """Runs all steps. `corpus` is a .jsonl file; None: the sources of Python."""
    started = time.monotonic()
    shutil.rmtree(output, ignore_errors=True)
    data = output / "data"
    data.mkdir(parents=True)

    say("1/7  text")
    documents = read_jsonl(corpus) if corpus else python_sources()
    held_out_bytes = split_corpus(documents, data, recipe.training_bytes)

    say("2/7  tokenizer")
    tool("train_tokenizer.py", "--input", data / "train.jsonl", "--vocab-size", recipe.vocab_size,
         "--max-bytes", recipe.tokenizer_bytes, "--output-dir", output / "tokenizer")  # fmt: skip
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", output / "tokenizer/vocab.json",
                 "--merge-file", output / "tokenizer/merges.txt"]  # fmt: skip

    say("3/7  preprocessing")
    for part in ("train", "held_out"):
        tool("preprocess_data.py", "--input", data / f"{part}.jsonl", "--output-prefix", data / part,
             *tokenizer, "--append-eod", "--workers", os.cpu_count() or 1)  # fmt: skip

    say("4/7  training, stopped half-way")
    train(recipe, output, tokenizer, "--exit-interval", recipe.iterations // 2)
    say("5/7  training, resumed from its checkpoint")
    train(recipe, output, tokenizer)

    say("6/7  sample and loss picture")
    sample = tool("generate.py", "--load", output / "checkpoints", "--prompt", "def ", "--max-new-tokens", 200,
                  "--temperature", 0.8, "--top-p", 0.95, "--seed", 1, capture=True)  # fmt: skip
    write_atomically(output / "sample.txt", sample)
    tool("plot_metrics.py", output / "metrics.jsonl", "--output", output / "loss.png")

    say("7/7  bits per byte on files that training never saw")
    held_out = all_tokens(data / "held_out_text_document")
    summary = {
        "bits_per_byte": model_bits(output / "checkpoints", held_out) / held_out_bytes,
        "bigram_bits_per_byte": bigram_bits(all_tokens(data / "train_text_document"), held_out) / held_out_bytes,
        "seconds": round(time.monotonic() - started, 1),
        "tokens": recipe.iterations * recipe.global_batch_size * recipe.seq_length,
        "held_out_bytes": held_out_bytes,
    }
    write_atomically(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    print(f"\nThe trained model wrote ({output / 'sample.txt'}):\n{sample}")


def say(step: str) -> None:
    """Prints the title of a step."""
    print(f"\n== {step}", flush=True)


def tool(name: str, *words: object, capture: bool = False) -> str:
    """Runs a tool of this folder. Its output is shown, or returned with `capture`."""
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, words)]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if capture else None)
    return done.stdout or ""


# ---------------------------------------------------------------------------------------------------------------------
# Text


def python_sources() -> Iterator[str]:
    """Yields the .py files of Python's standard library, in a fixed order, without very long ones."""
    found: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages")]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(found):
        if path.stat().st_size > LONGEST_FILE:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few test files are not UTF-8 on purpose
            continue
        if text.strip():
            yield text


def read_jsonl(path: Path) -> Iterator[str]:
    """Yields the `text` of each line of a .jsonl file. Raises UserError naming file and line."""
    if not path.is_file():
        raise UserError(f"--corpus {path}: no such file; give a .jsonl file with a key `text` in every line")
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f'{path}:{number}: expected a JSON object with a key "text" ({error})') from error


def split_corpus(documents: Iterator[str], folder: Path, training_bytes: int) -> int:
    """Writes train.jsonl, with about `training_bytes` of text, and held_out.jsonl. Returns the bytes of held-out text.

    Documents are ordered by a hash of their text, so both files are fair samples of the corpus.
    """
    texts = sorted((text.encode() for text in documents), key=lambda raw: hashlib.sha256(raw).digest())
    held_out: list[bytes] = []
    while texts and sum(map(len, held_out)) + len(texts[-1]) <= min(HELD_OUT_BYTES, training_bytes // 4):
        held_out.append(texts.pop())
    if not held_out or not texts:
        raise UserError("the corpus is too small to hold some of it out; give one with 50 documents or more")
    taken = itertools.accumulate(map(len, texts), initial=0)
    train = [raw for raw, before in zip(texts, taken, strict=False) if before < training_bytes]
    for name, part in (("train", train), ("held_out", held_out)):
        with open_atomically(folder / f"{name}.jsonl") as file:
            file.writelines(json.dumps({"text": raw.decode()}).encode() + b"\n" for raw in part)
    return sum(map(len, held_out))


# ---------------------------------------------------------------------------------------------------------------------
# Training


def train(recipe: Recipe, output: Path, tokenizer: list[object], *more: object) -> None:
    """Launches pretrain_gpt.py once. It resumes from a checkpoint if there is one."""
    gpus = torch.cuda.device_count()
    processes = 2 if gpus == 0 else max(count for count in (1, 2) if count <= gpus)
    flags: list[object] = [
        "--num-layers", recipe.num_layers, "--hidden-size", recipe.hidden_size,
        "--num-attention-heads", recipe.num_attention_heads, "--seq-length", recipe.seq_length,
        "--max-position-embeddings", recipe.seq_length, "--position-embedding-type", "rope",
        "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
        "--attention-dropout", 0, "--hidden-dropout", 0,
        "--micro-batch-size", recipe.micro_batch_size, "--global-batch-size", recipe.global_batch_size,
        "--train-iters", recipe.iterations, "--lr", recipe.learning_rate, "--min-lr", recipe.learning_rate / 20,
        "--lr-decay-style", "cosine", "--lr-warmup-iters", max(1, recipe.iterations // 20),
        "--weight-decay", 0.1, "--adam-beta2", 0.95, "--clip-grad", 1.0,
        "--train-data-path", output / "data/train_text_document",
        "--valid-data-path", output / "data/held_out_text_document",
        *tokenizer,
        "--eval-interval", max(4, recipe.iterations // 6), "--eval-iters", min(8, max(1, recipe.iterations // 4)),
        "--log-interval", max(1, recipe.iterations // 60), "--log-throughput",
        "--save", output / "checkpoints", "--load", output / "checkpoints",
        "--save-interval", max(2, recipe.iterations // 4), "--keep-last", 2,
        "--metrics-path", output / "metrics.jsonl",
        *(["--bf16"] if gpus else []),
        *more,
    ]  # fmt: skip
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    subprocess.run(
        [*launch, str(entry_script("gpt")), *map(str, flags)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)},
    )


# ---------------------------------------------------------------------------------------------------------------------
# Scores


def all_tokens(prefix: Path) -> np.ndarray:
    """Returns all tokens of a preprocessed dataset. Each document ends with the end-of-document token."""
    dataset = IndexedDataset(str(prefix))
    return np.concatenate([np.asarray(dataset[index]) for index in range(len(dataset))]).astype(np.int64)


def model_bits(checkpoints: Path, tokens: np.ndarray) -> float:
    """Returns the bits that the trained model needs for all tokens but the first.

    Windows overlap by half. The second half of each window counts, so that each token has at least half a window of
    context; of the first window, all tokens count.
    """
    trained = load_trained_model(build_model, checkpoints)
    length = trained.max_sequence_length
    stride = length // 2
    ids = torch.from_numpy(tokens).to(trained.device)
    windows = list(ids.unfold(0, length + 1, stride)) if len(ids) > length else []
    batches = [torch.stack(windows[first : first + 16]) for first in range(0, len(windows), 16)]
    batches.append(ids[None, len(windows) * stride :])  # the rest is a shorter window
    total = 0.0
    with torch.inference_mode():
        for number, rows in enumerate(batches):
            losses = trained.model(rows[:, :-1], labels=rows[:, 1:]).double()
            total += losses[:, length - stride :].sum().item()
            total += losses[0, : length - stride].sum().item() if number == 0 else 0.0
    return total / math.log(2)


def bigram_bits(train: np.ndarray, held_out: np.ndarray) -> float:
    """Returns the bits that a bigram model, fitted on the training tokens, needs for the same held-out tokens.

    Witten-Bell smoothing: the bigram frequency is interpolated with the unigram frequency; the weight of the unigram is
    the number of different tokens that follow the first token.
    """
    size = int(max(train.max(), held_out.max())) + 1
    unigram = np.bincount(train, minlength=size).astype(np.float64)
    unigram_probability = (unigram + 1.0) / (unigram.sum() + size)
    pairs, counts = np.unique(train[:-1] * size + train[1:], return_counts=True)
    followers = np.bincount(pairs // size, minlength=size).astype(np.float64)
    occurrences = np.bincount(train[:-1], minlength=size).astype(np.float64)
    first, second = held_out[:-1], held_out[1:]
    place = np.minimum(np.searchsorted(pairs, first * size + second), len(pairs) - 1)
    count = np.where(pairs[place] == first * size + second, counts[place], 0).astype(np.float64)
    weight = followers[first]
    seen = occurrences[first] + weight
    backed_off = unigram_probability[second]
    probability = np.where(seen > 0, (count + weight * backed_off) / np.maximum(seen, 1.0), backed_off)
    return float(-np.log2(probability).sum())


if __name__ == "__main__":
    run_main(main)
