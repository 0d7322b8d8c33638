"""Measures tools/preprocess_data.py on real text, and compares all token ids with those of the `tokenizers` library.

python benchmarks/bench_preprocess.py

The text is the sources and documents of the installed Python packages. The tool trains a byte-level BPE on part of it.
Then it times a plain loop over the library (one process, as in many scripts) and the tool. Prints rows of a table for
docs/benchmarks.md.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import numpy as np

from megatron.data.datasets.index_format import get_bin_path, get_idx_path, read_header
from megatron.data.tokenizer.base import load_library

TOOLS = Path(__file__).resolve().parents[1] / "tools"
TEXT_SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".json", ".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".js"}
LONGEST_FILE = 4_000_000


@dataclass(frozen=True)
class Timing:
    """The time of one way to make token ids."""

    what: str
    megabytes: float
    seconds: float
    tokens: int

    @property
    def row(self) -> str:
        """Returns the row of the table."""
        rate, tokens = self.megabytes / self.seconds, self.tokens / self.seconds / 1e6
        return (
            f"| {self.what} | {self.megabytes:.0f} MB in {self.seconds:.1f} s | {rate:.1f} MB/s | {tokens:.2f} Mtok/s |"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--megabytes", type=int, default=250, help="largest amount of text, in MB (default: %(default)s)"
    )
    parser.add_argument(
        "--loop-megabytes", type=int, default=250, help="MB of it for the plain loop (default: %(default)s)"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=32768, help="vocabulary of the tokenizer (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="processes (default: 1 2)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of the tool for each number (default: %(default)s)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        corpus = work / "corpus.jsonl"
        write_corpus(corpus, args.megabytes * 1_000_000)
        run_tool("train_tokenizer.py", "--input", corpus, "--output-dir", work, "--vocab-size", args.vocab_size,
                 "--max-bytes", 60_000_000)  # fmt: skip
        expected, loop = library_loop(work, corpus, args.loop_megabytes * 1_000_000)
        print(loop.row, flush=True)
        for workers in args.workers:
            timings = [time_tool(work, corpus, workers) for _ in range(args.repeat)]
            best = min(timings, key=lambda timing: timing.seconds)
            print(
                best.row + f" all runs: {', '.join(f'{t.megabytes / t.seconds:.1f}' for t in timings)} MB/s", flush=True
            )
        return compare(expected, str(work / "out_text_document"))


def write_corpus(path: Path, at_most: int) -> None:
    """Writes each installed text file as a line of JSON, every other one in ASCII with escapes, as is common."""
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for number, text in enumerate(installed_texts()):
            line = json.dumps({"text": text}, ensure_ascii=number % 2 == 0) + "\n"
            written += len(line.encode())
            if written > at_most:
                return
            file.write(line)


def installed_texts() -> Iterator[str]:
    """Yields the texts of the files of site-packages and the standard library, in a fixed order."""
    seen = set()
    for root in dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")]):
        for path in sorted(Path(root).rglob("*")):
            if path.suffix in TEXT_SUFFIXES and path not in seen and path.is_file():
                seen.add(path)
                content = path.read_bytes()
                try:
                    if 0 < len(content) < LONGEST_FILE:
                        yield content.decode()
                except UnicodeDecodeError:
                    continue


def run_tool(name: str, *words: object) -> None:
    """Runs a tool of this project as a user does."""
    command = [sys.executable, str(TOOLS / name), *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def library_loop(work: Path, corpus: Path, at_most: int) -> tuple[np.ndarray, Timing]:
    """Encodes line by line with the library alone. Returns all ids, and the time."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_library("tokenizers").ByteLevelBPETokenizer(str(work / "vocab.json"), str(work / "merges.txt"))
    pieces, read = [], 0
    began = time.perf_counter()
    with open(corpus, "rb") as file:
        for line in file:
            pieces.append(np.array(tokenizer.encode(json.loads(line)["text"]).ids, np.int32))
            read += len(line)
            if read >= at_most:
                break
    seconds = time.perf_counter() - began
    ids = np.concatenate(pieces)
    return ids, Timing("`tokenizers` in a loop, 1 process", read / 1e6, seconds, ids.size)


def time_tool(work: Path, corpus: Path, workers: int) -> Timing:
    """Times a run of tools/preprocess_data.py, from the start to the end of its process."""
    began = time.perf_counter()
    run_tool("preprocess_data.py", "--input", corpus, "--output-prefix", work / "out", "--workers", workers,
             "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", work / "vocab.json", "--merge-file",
             work / "merges.txt")  # fmt: skip
    seconds = time.perf_counter() - began
    tokens = prepared_ids(str(work / "out_text_document")).size
    return Timing(f"`tools/preprocess_data.py --workers {workers}`", corpus.stat().st_size / 1e6, seconds, tokens)


def prepared_ids(prefix: str) -> np.ndarray:
    """Returns all ids of a data set."""
    return np.memmap(get_bin_path(prefix), read_header(get_idx_path(prefix)).dtype, mode="r")


def compare(expected: np.ndarray, prefix: str) -> int:
    """Checks that the data set begins with the expected ids, and prints the result. Returns the exit code."""
    found = prepared_ids(prefix)
    same = found.size >= expected.size and np.array_equal(found[: expected.size], expected)
    print(f"{expected.size:,} of {found.size:,} ids compared: {'all equal' if same else 'THEY DIFFER'}")
    return 0 if same else 1


if __name__ == "__main__":
    run_main(main)
