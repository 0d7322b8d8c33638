"""Drops rows that break rules of quality, or that share word n-grams with an evaluation set."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.exceptions import UserError
from megatron.core.utils.files import open_atomically, parse_json, write_atomically
from megatron.data.cleaning.config import FilterConfig
from megatron.data.cleaning.quality import c4, compile_blocklist, gopher_quality, gopher_repetition, lengths
from megatron.data.cleaning.rows import Block, count_lines, divide, read_rows, source_of, write_plain_lines
from megatron.data.cleaning.running import refuse_no_rows, run_tasks, run_tool
from megatron.data.cleaning.shingles import hashes_in_order
from megatron.data.preparation.inputs import InputFile, find_inputs

_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 200
_PUBLISHED = {"gopher": gopher_quality, "gopher-repetition": gopher_repetition, "c4": c4}

Rule = Callable[[str], str | None]
"""Returns the name of the rule that a text breaks, or None."""


def filter_rows(config: FilterConfig, warn: Callable[[str], None]) -> dict[str, Any]:
    """Writes the kept rows and the report. Returns the report. Raises UserError as `run_tool`, and if no row is
    left."""
    evaluation = find_inputs(config.decontaminate, warn) if config.decontaminate else ()
    phrases = _read_blocklist(config.blocklist)

    def clean(folder: Path, blocks: Sequence[Block], results: Path) -> Mapping[str, object]:
        rules = _rules_of(config, phrases, _hashes_of(evaluation, config, folder))
        job = _Job(config, folder, blocks, rules)
        run_tasks(len(job.blocks), config.workers, job.filter)
        counts = _join(job, results)
        refuse_no_rows(config, counts["rows"])
        if not counts["kept_rows"]:
            most = max(counts["dropped"], key=counts["dropped"].get)
            raise UserError(
                f"--input {' '.join(config.input or ())}: all {counts['rows']} rows would be dropped, most by the rule "
                f"'{most}'; nothing was written; relax the rules"
            )
        return counts

    return run_tool("filter", config, warn, clean, evaluation, {"blocklist content": phrases})


def _rules_of(config: FilterConfig, phrases: Sequence[str], forbidden: dict[int, np.ndarray]) -> list[Rule]:
    rules: list[Rule] = [lambda text: lengths(text, config.min_characters, config.max_characters)]
    rules += [_PUBLISHED[name] for name in config.quality_rules or ()]
    rules += [_match_rule(re.compile(pattern), drop=True) for pattern in config.drop_if_matches or ()]
    if config.keep_if_matches:
        wanted = [re.compile(pattern) for pattern in config.keep_if_matches]
        rules.append(
            lambda text: None if any(pattern.search(text) for pattern in wanted) else "matches no --keep-if-matches"
        )
    blocked = compile_blocklist(iter(phrases))
    if blocked:
        rules.append(lambda text: "blocklist" if blocked.search(text) else None)
    if forbidden:
        rules.append(lambda text: "shared with an evaluation set" if _shares(text, forbidden) else None)
    return rules


def _match_rule(pattern: re.Pattern[str], drop: bool) -> Rule:
    return lambda text: f"matches {pattern.pattern}" if bool(pattern.search(text)) == drop else None


def _read_blocklist(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = [line for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--blocklist {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    if not lines:
        raise UserError(f"--blocklist {path}: is empty; write one word or phrase per line")
    return lines


# --- evaluation sets -------------------------------------------------------------------------------------------------


def plain_words(text: str) -> str:
    """Returns a text in lower case with blanks in place of everything but letters, digits and marks, so that case and
    punctuation do not hide an n-gram (Brown et al., "Language Models are Few-Shot Learners" (2020), appendix C)."""
    return _NO_WORD.sub(" ", text.lower())


_NO_WORD = re.compile(r"[^\w\s]+|_+")


def _hashes_of(files: Sequence[InputFile], config: FilterConfig, folder: Path) -> dict[int, np.ndarray]:
    """Returns the n-grams of the evaluation sets as sorted hashes, by the number of their words: n, or fewer for a
    text that is shorter."""
    if not files:
        return {}
    key = config.decontamination_key or config.key
    found: dict[int, list[np.ndarray]] = {}
    place = folder / "evaluation"
    place.mkdir(exist_ok=True)
    sources = [source_of(file, place) for file in files]
    for source in sources:
        write_plain_lines(source, key)
    for block in divide(sources):
        for row in read_rows(block, key, skip_bad=False):
            text = plain_words(row.text)
            words = min(config.ngram_words, len(text.split(None, config.ngram_words)))
            if words:
                found.setdefault(words, []).append(hashes_in_order(text, words))
    if not found:
        raise UserError(f"--decontaminate {' '.join(config.decontaminate or ())}: contains no words")
    return {words: np.unique(np.concatenate(hashes)) for words, hashes in sorted(found.items())}


def _shares(text: str, forbidden: dict[int, np.ndarray]) -> bool:
    plain = plain_words(text)
    for words, hashes in forbidden.items():
        own = hashes_in_order(plain, words)
        places = np.minimum(np.searchsorted(hashes, own), hashes.size - 1)
        if (hashes[places] == own).any():
            return True
    return False


# --- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """The filtering of the blocks: for each, a file of kept rows and a record of what was dropped."""

    config: FilterConfig
    folder: Path
    blocks: Sequence[Block]
    rules: Sequence[Rule]

    def paths(self, number: int) -> tuple[Path, Path]:
        return self.folder / f"block-{number:06d}.rows", self.folder / f"block-{number:06d}.json"

    def filter(self, number: int) -> None:
        """Writes the files of a block, unless an earlier run has written them."""
        rows_path, record_path = self.paths(number)
        if record_path.exists():
            return
        dropped: Counter[str] = Counter()
        counts = Counter(rows=0, kept_rows=0, bad_lines=0, bytes=0, kept_bytes=0)
        examples: dict[str, list[list[Any]]] = {}
        with open_atomically(rows_path) as file:
            for row in read_rows(self.blocks[number], self.config.key, self.config.on_error == "skip"):
                if row.fault is not None:
                    counts["bad_lines"] += 1
                    continue
                counts["rows"] += 1
                counts["bytes"] += len(row.line)
                broken = next((name for name in (rule(row.text) for rule in self.rules) if name is not None), None)
                if broken is None:
                    counts["kept_rows"] += 1
                    counts["kept_bytes"] += file.write(row.line if row.line.endswith(b"\n") else row.line + b"\n")
                    continue
                dropped[broken] += 1
                if dropped[broken] <= _EXAMPLES:
                    examples.setdefault(broken, []).append([row.line_number, row.text[:_EXAMPLE_CHARACTERS]])
        lines = count_lines(self.blocks[number])
        record = {"counts": counts, "dropped": dropped, "examples": examples, "lines": lines}
        write_atomically(record_path, json.dumps(record))


def _join(job: _Job, results: Path) -> dict[str, Any]:
    """Joins the kept rows of the blocks of each source. Returns counts and examples for the report."""
    counts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    examples: dict[str, list[dict[str, str]]] = {}
    lines_before: Counter[int] = Counter()
    for number, block in enumerate(job.blocks):
        rows_path, record_path = job.paths(number)
        record = parse_json(record_path.read_bytes())
        counts.update(record["counts"])
        dropped.update(record["dropped"])
        file = block.source.file
        for rule, found in record["examples"].items():
            named = [
                {"row": f"{Path(file.path).name}:{lines_before[file.index] + line + 1}", "text": text}
                for line, text in found
            ]
            examples[rule] = [*examples.get(rule, []), *named][:_EXAMPLES]
        lines_before[file.index] += record["lines"]
        with open(results / block.source.output_name, "ab") as joined:
            joined.write(rows_path.read_bytes())
    ordered = dict(sorted(dropped.items(), key=lambda pair: (-pair[1], pair[0])))
    return {
        **{name: counts[name] for name in ("rows", "kept_rows", "bad_lines", "bytes", "kept_bytes")},
        "dropped": ordered,
        "examples": {rule: examples[rule] for rule in ordered},
    }
