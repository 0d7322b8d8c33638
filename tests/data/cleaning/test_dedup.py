"""megatron/data/cleaning/dedup.py and tools/dedup.py: planted duplicates, any input, workers, kills, mistakes."""

import gzip
import importlib
import io
import json
import os
import random
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from megatron.core.exceptions import UserError
from megatron.data.cleaning import dedup as module
from megatron.data.cleaning import rows
from megatron.data.cleaning.config import DedupConfig, FilterConfig
from megatron.data.cleaning.dedup import deduplicate, without_paragraphs
from megatron.data.cleaning.filtering import filter_rows
from megatron.data.preparation.config import PreparationConfig
from megatron.data.preparation.manifest import read_manifest
from megatron.data.preparation.prepare import prepare
from megatron.data.tokenizer.null import NullTokenizer

ROOT = Path(__file__).parents[3]


def write(path: Path, texts: list[str], **fields: object) -> None:
    records = [{"id": number, "text": text, **fields} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def run(tmp_path: Path, name: str = "out", **fields: object) -> dict:
    chosen = {"input": [str(tmp_path / "in")], "output": str(tmp_path / name), "workers": 1} | fields
    return deduplicate(DedupConfig(**chosen), lambda line: None)


def kept_lines(folder: Path) -> list[bytes]:
    return [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines(keepends=True)]


def words(source: random.Random, count: int) -> list[str]:
    return [f"w{source.randrange(30000)}" for _ in range(count)]


@pytest.fixture
def planted(tmp_path):
    """Texts with copies at Jaccard similarities near 0.9 and 0.45, by the number of changed words."""
    source = random.Random(3)
    originals = [words(source, 500) for _ in range(30)]
    near, far = [], []
    for text in originals:
        for copies, changed in ((near, 5), (far, 40)):
            copy = text[:]
            for place in range(changed):
                copy[5 + place * (500 // changed - 1)] = "changed"
            copies.append(copy)
    (tmp_path / "in").mkdir()
    for name, texts in (("a", originals), ("b", near), ("c", far)):
        write(tmp_path / "in" / f"{name}.jsonl", [" ".join(text) for text in texts])
    return tmp_path


def test_planted_near_duplicates(planted):
    report = run(planted, method="minhash")
    kept = {path.name[6]: len(path.read_bytes().splitlines()) for path in (planted / "out").glob("*.jsonl")}
    assert kept["a"] == 30 and kept["c"] == 30 and kept.get("b", 0) <= 2
    assert report["similar"] == report["dropped_rows"] == 30 - kept.get("b", 0)
    example = report["examples"][0]
    assert example["jaccard"] >= 0.8 and (example["dropped"], example["kept"]) == ("b.jsonl:1", "a.jsonl:1")
    original = (planted / "in/a.jsonl").read_bytes()
    assert (planted / "out/00000-a.jsonl").read_bytes() == original


def test_workers_and_a_kill_do_not_change_the_result(planted, monkeypatch):
    monkeypatch.setattr(rows.divide, "__defaults__", (20_000,))
    run(planted, "one")
    run(planted, "three", workers=3)
    scan, scanned = module._Job.scan, []

    def interrupted(self, number):
        scanned.append(number)
        if len(scanned) == 5:
            raise KeyboardInterrupt
        scan(self, number)

    monkeypatch.setattr(module._Job, "scan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(planted, "killed")
    assert not (planted / "killed").exists()
    (left,) = planted.glob(".killed.cleaning.*")
    times = {path.name: path.stat().st_mtime_ns for path in left.glob("block-*")}
    assert len(times) == 4
    run(planted, "killed", workers=2)
    assert not left.exists()
    first = {path.name: path.read_bytes() for path in (planted / "one").iterdir()}
    assert len(first) == 4
    for name in ("three", "killed"):
        assert {path.name: path.read_bytes() for path in (planted / name).iterdir()} == first


def test_equal_texts_of_any_input_keep_the_first_row(tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.jsonl", ["one two", "é\u2028x", "one two"], extra={"k": [1, 2.50]})
    (tmp_path / "in/b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "new"}\n\n{"other": 1,  "text":"one two"}'))
    table = pyarrow.table({"text": ["new", "last"], "n": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "in/c.parquet")
    report = run(tmp_path, method="exact")
    first = (tmp_path / "in/a.jsonl").read_bytes().splitlines(keepends=True)
    assert kept_lines(tmp_path / "out") == [*first[:2], b'{"text": "new"}\n', b'{"text": "last", "n": 2}\n']
    assert (report["rows"], report["kept_rows"], report["equal"], report["similar"]) == (7, 4, 3, 0)
    assert [(e["dropped"], e["kept"]) for e in report["examples"]] == [
        ("a.jsonl:3", "a.jsonl:1"),
        ("b.jsonl.gz:3", "a.jsonl:1"),
        ("c.parquet:1", "b.jsonl.gz:1"),
    ]
    assert not list(tmp_path.glob(".out*"))


def test_paragraphs(tmp_path):
    (tmp_path / "in").mkdir()
    footer, body = "all rights of this page reserved", "a body with five words"
    write(tmp_path / "in/a.jsonl", [f"{body}\n{footer}\n", f"ok\n\n{footer}\nmore of it", footer, "ok"], n=1)
    report = run(tmp_path, level="paragraph", method="both")
    texts = [json.loads(line)["text"] for line in kept_lines(tmp_path / "out")]
    assert texts == [f"{body}\n{footer}\n", "ok\n\nmore of it", "ok"]
    assert (report["changed_rows"], report["dropped_rows"], report["equal"]) == (1, 1, 2)
    assert without_paragraphs(b'{"n": 1, "text": "a\\nb", "m": "\xc3\xa9"}', "text", {0}) == (
        '{"n": 1, "text": "b", "m": "é"}\n'.encode()
    )


def test_a_finished_run_is_not_done_again(tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.jsonl", ["x", "x"])
    report = run(tmp_path)
    before = os.stat(tmp_path / "out/report.json").st_mtime_ns
    again = run(tmp_path)
    assert again["kept_rows"] == report["kept_rows"] == 1
    assert os.stat(tmp_path / "out/report.json").st_mtime_ns == before
    with pytest.raises(UserError, match="holds files of something else; name a new folder"):
        run(tmp_path, threshold=0.7)


def test_mistakes_are_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    main = importlib.import_module("dedup").main
    (tmp_path / "in").mkdir()
    target = tmp_path / "out"

    def error_of(*flags: object) -> str:
        assert main([*map(str, flags)]) == 2
        assert not target.exists() and not list(tmp_path.glob(".out*"))
        return capsys.readouterr().err

    paths = "--input", tmp_path / "in", "--output", target
    assert "a folder without input files" in error_of(*paths)
    (tmp_path / "in/a.jsonl").write_text("\n \n")
    assert f"--input {tmp_path}/in: contains no rows" in error_of(*paths)
    (tmp_path / "in/a.jsonl").write_text('{"text": "x"}\n\n{"body": "x"}\n')
    for workers in 1, 2:
        assert "a.jsonl:3: no key 'text'; keys present: 'body'" in error_of(*paths, "--workers", workers)
    assert "--output" in error_of("--input", tmp_path / "in", "--output", tmp_path / "in/out")
    assert "--threshold 1.5: must be above 0" in error_of(*paths, "--threshold", 1.5)
    assert main([*map(str, paths), "--on-error", "skip"]) == 0
    assert "1 of 1 rows kept" in capsys.readouterr().out


def test_rows_of_a_store_are_those_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.jsonl", ["one two", "three", "one two"])
    fsspec.filesystem("memory").pipe_file("memory://dedup/a.jsonl", (tmp_path / "in" / "a.jsonl").read_bytes())
    run(tmp_path, method="exact")
    run(tmp_path, "stored", method="exact", input=["memory://dedup"])
    assert kept_lines(tmp_path / "stored") == kept_lines(tmp_path / "out") != []


def test_the_manifest_says_how_the_text_was_cleaned(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.jsonl", ["1 2", "3", "1 2", "4 5 6 7 8 9"])
    run(tmp_path, method="exact")
    chosen = FilterConfig(input=[str(tmp_path / "out")], output=str(tmp_path / "good"), min_characters=2)
    filter_rows(chosen, lambda line: None)
    config = PreparationConfig(input=[str(tmp_path / "good")], output_prefix=str(tmp_path / "ids"))
    prepare(config, NullTokenizer(9), Console(file=io.StringIO()), lambda line: None)
    manifest = read_manifest(f"{tmp_path}/ids_text_document")
    assert manifest is not None
    assert [(step["tool"], step["rows"], step["kept_rows"]) for step in manifest.cleaning] == [
        ("dedup", 4, 3),
        ("filter", 3, 2),
    ]
    assert manifest.cleaning[1]["dropped"] == {"length: too short": 1}
