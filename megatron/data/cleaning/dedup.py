"""Removes duplicate rows or paragraphs: scans blocks in parallel, decides in the order of the input, and writes."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.utils.files import open_atomically
from megatron.data.cleaning.config import DedupConfig
from megatron.data.cleaning.near_duplicates import Bands, band_keys, choose_bands, decide, find_buckets
from megatron.data.cleaning.rows import Block, count_lines, read_rows, text_of
from megatron.data.cleaning.running import refuse_no_rows, run_tasks, run_tool
from megatron.data.cleaning.shingles import WORDS, shingle_hashes, signature

_EXAMPLES = 10
_EXAMPLE_CHARACTERS = 200


def deduplicate(config: DedupConfig, warn: Callable[[str], None]) -> dict[str, Any]:
    """Writes the kept rows and the report. Returns the report. Raises UserError as `run_tool`."""

    def clean(folder: Path, blocks: Sequence[Block], results: Path) -> Mapping[str, object]:
        bands = choose_bands(config.threshold) if config.method != "exact" else None
        job = _Job(config, folder, blocks, bands)
        signature("", bands.size if bands else 1)  # compiles, or loads, the kernels before workers are forked
        run_tasks(len(job.blocks), config.workers, job.scan)
        items = _Items(job)
        refuse_no_rows(config, items.rows)
        kept_of = items.decide()
        return {**_write(job, items, kept_of, results), "examples": items.examples(kept_of)}

    return run_tool("dedup", config, warn, clean)


def paragraphs_of(text: str) -> list[str]:
    """Returns the lines of a text, each with its newline, so that they join to the text."""
    return text.splitlines(keepends=True)


class _Job:
    """The scan of the blocks: for each, an archive of arrays about its rows and their items (texts or paragraphs)."""

    def __init__(self, config: DedupConfig, folder: Path, blocks: Sequence[Block], bands: Bands | None) -> None:
        self.config, self.folder, self.blocks, self.bands = config, folder, blocks, bands
        self.skips = config.on_error == "skip"

    def path(self, number: int) -> Path:
        return self.folder / f"block-{number:06d}.npz"

    def load(self, number: int) -> Any:
        return np.load(self.path(number))

    def scan(self, number: int) -> None:
        """Writes the archive of a block, unless an earlier run has written it."""
        if self.path(number).exists():
            return
        offsets: list[tuple[int, int]] = []
        lines: list[int] = []
        row_of_item: list[int] = []
        part_of_item: list[int] = []
        digests: list[bytes] = []
        signatures: list[np.ndarray] = []
        bad = 0
        for row in read_rows(self.blocks[number], self.config.key, self.skips):
            if row.fault is not None:
                bad += 1
                continue
            for part, item in self.items_of(row.text):
                row_of_item.append(len(offsets))
                part_of_item.append(part)
                digests.append(hashlib.blake2b(item.encode(errors="replace"), digest_size=16).digest())
                if self.bands:
                    signatures.append(signature(item, self.bands.size))
            offsets.append((row.offset, len(row.line)))
            lines.append(row.line_number)
        size = self.bands.size if self.bands else 0
        with open_atomically(self.path(number)) as file:
            np.savez(
                file,
                rows=np.array(offsets, np.int64).reshape(-1, 2),
                line_numbers=np.array(lines, np.int64),
                lines=np.int64(count_lines(self.blocks[number])),
                bad=np.int64(bad),
                row_of_item=np.array(row_of_item, np.int64),
                part_of_item=np.array(part_of_item, np.int64),
                digests=np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2),
                signatures=np.array(signatures, np.uint32).reshape(len(signatures), size),
            )

    def items_of(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields what is compared of a text, each with its index: the text, or its paragraphs of five words or more."""
        if self.config.level == "document":
            yield 0, text
            return
        for part, paragraph in enumerate(paragraphs_of(text)):
            if len(paragraph.split(None, WORDS)) >= WORDS:
                yield part, paragraph.strip()


class _Items:
    """The items of all blocks, numbered in the order of the input."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        rows, items, lines, self.bad = [0], [0], [0], 0
        for number in range(len(job.blocks)):
            with job.load(number) as block:
                rows.append(rows[-1] + len(block["rows"]))
                items.append(items[-1] + len(block["row_of_item"]))
                lines.append(lines[-1] + int(block["lines"]))
                self.bad += int(block["bad"])
        self.rows, self.count = rows[-1], items[-1]
        self._starts = np.array(items)
        self._lines_before = np.array(lines)
        self._open = functools.lru_cache(maxsize=64)(self._load)
        self.exact = np.zeros(self.count, bool)
        """Items whose text equals an earlier item's."""
        self.similarity: dict[int, float] = {}

    def range_of(self, number: int) -> slice:
        return slice(self._starts[number], self._starts[number + 1])

    def decide(self) -> np.ndarray:
        """Returns the kept item that each item is a duplicate of; -1 for a kept item."""
        kept_of = self._decide_exact()
        if self._job.bands and self.count:
            self._decide_similar(kept_of, self._job.bands)
        return kept_of

    def _decide_exact(self) -> np.ndarray:
        digests = np.empty((self.count, 2), np.uint64)
        for number in range(len(self._job.blocks)):
            with self._job.load(number) as block:
                digests[self.range_of(number)] = block["digests"]
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal digests stay in the order of the input
        ordered = digests[order]
        new = np.ones(self.count, bool)
        new[1:] = (ordered[1:] != ordered[:-1]).any(1)
        first = order[np.maximum.accumulate(np.where(new, np.arange(self.count), 0))]
        kept_of = np.full(self.count, -1, np.int64)
        kept_of[order] = np.where(new, -1, first)
        self.exact = kept_of >= 0
        return kept_of

    def _decide_similar(self, kept_of: np.ndarray, bands: Bands) -> None:
        folder, blocks = self._job.folder, range(len(self._job.blocks))
        keys = np.memmap(folder / "keys", np.uint64, "w+", shape=(bands.count, self.count))
        for number in blocks:
            with self._job.load(number) as block:
                keys[:, self.range_of(number)] = band_keys(block["signatures"], bands)
        found = find_buckets(keys, ~self.exact)
        if not len(found.items):
            return
        signatures = np.memmap(folder / "signatures", np.uint32, "w+", shape=(len(found.items), bands.size))
        for number in blocks:
            first, end = np.searchsorted(found.items, self._starts[number : number + 2])
            with self._job.load(number) as block:
                signatures[first:end] = block["signatures"][found.items[first:end] - self._starts[number]]
        threshold = self._job.config.threshold
        decisions = decide(found, signatures, threshold, lambda index: shingle_hashes(self.text(found.items[index])))
        dropped = np.flatnonzero(decisions.duplicate_of >= 0)
        kept_of[found.items[dropped]] = found.items[decisions.duplicate_of[dropped]]
        self.similarity = dict(zip(found.items[dropped].tolist(), decisions.similarity[dropped].tolist(), strict=True))
        # A text that equals a dropped one is similar to the row that was kept instead.
        again = np.flatnonzero(self.exact)
        moved = kept_of[kept_of[again]] >= 0
        kept_of[again[moved]] = kept_of[kept_of[again[moved]]]

    def _load(self, number: int) -> dict[str, np.ndarray]:
        with self._job.load(number) as block:
            return {name: block[name] for name in ("rows", "row_of_item", "part_of_item", "line_numbers")}

    def text(self, item: int) -> str:
        """Reads the text of an item again."""
        number, row, part = self._place(item)
        offset, length = self._open(number)["rows"][row]
        with open(self._job.blocks[number].source.path, "rb") as file:
            file.seek(offset)
            text = text_of(file.read(length), self._job.config.key)
        return dict(self._job.items_of(text))[part]

    def _place(self, item: int) -> tuple[int, int, int]:
        number = int(np.searchsorted(self._starts, item, side="right")) - 1
        block, index = self._open(number), item - self._starts[number]
        return number, int(block["row_of_item"][index]), int(block["part_of_item"][index])

    def name(self, item: int) -> str:
        """Returns file and line of an item."""
        number, row, _ = self._place(item)
        block = self._job.blocks[number]
        first = next(other.number for other in self._job.blocks if other.source is block.source)
        line = self._lines_before[number] - self._lines_before[first] + self._open(number)["line_numbers"][row] + 1
        return f"{Path(block.source.file.path).name}:{line}"

    def examples(self, kept_of: np.ndarray) -> list[dict[str, Any]]:
        """Returns the first dropped items of each kind, each with the kept item that it is a duplicate of."""
        near = np.fromiter(self.similarity, np.int64, len(self.similarity))
        found = [("equal", item) for item in np.flatnonzero(self.exact)[:_EXAMPLES].tolist()]
        found += [("similar", item) for item in np.sort(near)[:_EXAMPLES].tolist()]
        return [
            {
                "reason": reason,
                **({"jaccard": round(self.similarity[item], 4)} if reason == "similar" else {}),
                "dropped": self.name(item),
                "kept": self.name(kept_of[item]),
                "dropped_text": self.text(item)[:_EXAMPLE_CHARACTERS],
                "kept_text": self.text(kept_of[item])[:_EXAMPLE_CHARACTERS],
            }
            for reason, item in found
        ]


def _write(job: _Job, items: _Items, kept_of: np.ndarray, results: Path) -> dict[str, int]:
    """Writes the kept rows of each source. Returns the counts of the report."""
    kept = changed = bytes_read = bytes_written = 0
    for number, block in enumerate(job.blocks):
        with job.load(number) as arrays:
            rows, row_of_item, parts = arrays["rows"], arrays["row_of_item"], arrays["part_of_item"]
        dropped = kept_of[items.range_of(number)] >= 0
        parts_of_row: dict[int, set[int]] = {}
        for row, part in zip(row_of_item[dropped].tolist(), parts[dropped].tolist(), strict=True):
            parts_of_row.setdefault(row, set()).add(part)
        with open(block.source.path, "rb") as plain, open(results / block.source.output_name, "ab") as file:
            for row, (offset, length) in enumerate(rows.tolist()):
                plain.seek(offset)
                bytes_read += length
                if row in parts_of_row and job.config.level == "document":
                    continue
                line = plain.read(length)
                if row in parts_of_row:
                    line = without_paragraphs(line, job.config.key, parts_of_row[row])
                    changed += 1
                    if not line:
                        continue
                kept += 1
                bytes_written += file.write(line if line.endswith(b"\n") else line + b"\n")
    return {
        "rows": items.rows,
        "kept_rows": kept,
        "dropped_rows": items.rows - kept,
        "changed_rows": changed - (items.rows - kept) if job.config.level == "paragraph" else 0,
        "equal": int(items.exact.sum()),
        "similar": len(items.similarity),
        "bad_lines": items.bad,
        "bytes": bytes_read,
        "kept_bytes": bytes_written,
    }


def without_paragraphs(line: bytes, key: str, dropped: set[int]) -> bytes:
    """Returns a line of JSON without some paragraphs of its text; nothing if only white space is left of the text."""
    text = text_of(line, key)
    left = "".join(paragraph for part, paragraph in enumerate(paragraphs_of(text)) if part not in dropped)
    if not left.strip():
        return b""
    record = json.loads(line)
    record[key] = left
    return json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"
