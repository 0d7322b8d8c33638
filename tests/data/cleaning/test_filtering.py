"""megatron/data/cleaning/filtering.py and tools/filter_data.py: rules, evaluation sets, workers, kills, mistakes."""

import importlib
import json
from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.data.cleaning import filtering as module
from megatron.data.cleaning import rows
from megatron.data.cleaning.config import FilterConfig
from megatron.data.cleaning.filtering import filter_rows, plain_words

ROOT = Path(__file__).parents[3]
QUESTION = "What is the capital of the country that lies between the two seas, and why is it there?"


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "in").mkdir()
    texts = [
        "a good text",
        "",
        "call 555-1234 now",
        "a text with a Bad Word.",
        f"Quiz: {QUESTION.upper().replace(',', ' -')} Because.",
        " ".join(QUESTION.split()[:12]),
        "the short item",
        "more of a good text, the longest of them all",
    ]
    lines = [json.dumps({"n": number, "text": text}) + "\n" for number, text in enumerate(texts)]
    (tmp_path / "in/a.jsonl").write_text("".join(lines[:5]))
    (tmp_path / "in/b.jsonl").write_text("\n" + "".join(lines[5:]))
    (tmp_path / "block.txt").write_text("bad word\n")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"q": QUESTION}) + "\n" + json.dumps({"q": "Short item?"}) + "\n")
    return tmp_path


def run(corpus: Path, name: str = "out", **fields: object) -> dict:
    chosen = {"input": [str(corpus / "in")], "output": str(corpus / name), "workers": 1} | fields
    return filter_rows(FilterConfig(**chosen), lambda line: None)


def all_rules(corpus: Path) -> dict:
    return {
        "drop_if_matches": [r"\d{3}-\d{4}"],
        "blocklist": str(corpus / "block.txt"),
        "decontaminate": [str(corpus / "eval.jsonl")],
        "decontamination_key": "q",
    }


def kept(folder: Path) -> list[int]:
    return [json.loads(line)["n"] for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def test_every_rule_drops_its_rows(corpus):
    report = run(corpus, **all_rules(corpus))
    assert kept(corpus / "out") == [0, 5, 7]
    assert report["dropped"] == {
        "shared with an evaluation set": 2,
        "blocklist": 1,
        "length: too short": 1,
        r"matches \d{3}-\d{4}": 1,
    }
    assert [example["row"] for example in report["examples"]["shared with an evaluation set"]] == [
        "a.jsonl:5",
        "b.jsonl:3",
    ]
    assert (report["rows"], report["kept_rows"]) == (8, 3)
    lines = (corpus / "in/a.jsonl").read_bytes().splitlines(keepends=True)
    assert (corpus / "out/00000-a.jsonl").read_bytes() == lines[0]
    run(corpus, "longest", keep_if_matches=["longest", "^call"])
    assert kept(corpus / "longest") == [2, 7]
    run(corpus, "whole", decontaminate=[str(corpus / "eval.jsonl")], decontamination_key="q", ngram_words=12)
    assert kept(corpus / "whole") == [0, 2, 3, 7]


def test_punctuation_and_case_do_not_hide_an_ngram():
    assert plain_words("Why, is_it 3.5?").split() == ["why", "is", "it", "3", "5"]


def test_workers_and_a_kill_do_not_change_the_result(corpus, monkeypatch):
    monkeypatch.setattr(rows.divide, "__defaults__", (60,))
    rules = all_rules(corpus)
    run(corpus, "one", **rules)
    run(corpus, "three", workers=3, **rules)
    do, done = module._Job.filter, []

    def interrupted(self, number):
        done.append(number)
        if len(done) == 3:
            raise KeyboardInterrupt
        do(self, number)

    monkeypatch.setattr(module._Job, "filter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, "killed", **rules)
    (left,) = corpus.glob(".killed.cleaning.*")
    assert len(list(left.glob("*.json"))) == 2 and not (corpus / "killed").exists()
    run(corpus, "killed", workers=2, **rules)
    first = {path.name: path.read_bytes() for path in (corpus / "one").iterdir()}
    assert len(first) == 3
    for name in ("three", "killed"):
        assert {path.name: path.read_bytes() for path in (corpus / name).iterdir()} == first


def test_mistakes_are_one_sentence(corpus, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    main = importlib.import_module("filter_data").main
    paths = "--input", corpus / "in", "--output", corpus / "out"

    def error_of(*flags: object) -> str:
        assert main([*map(str, paths), *map(str, flags)]) == 2
        assert not (corpus / "out").exists() and not list(corpus.glob(".out*"))
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "all 8 rows would be dropped, most by the rule 'length: too short'" in error_of("--min-characters", 999)
    (corpus / "empty").write_text("\n")
    assert "--blocklist" in error_of("--blocklist", corpus / "empty")
    assert "contains no words" in error_of("--decontaminate", corpus / "empty")
    assert "no key 'text'; keys present: 'q'" in error_of("--decontaminate", corpus / "eval.jsonl")
    assert "'(' is no regular expression" in error_of("--drop-if-matches", "(")
    assert "gopher-repetition" in error_of("--quality-rules", "gophers")
    assert main([*map(str, paths), "--quality-rules", "gopher", "c4"]) == 2


def test_a_finished_run_is_not_done_again(corpus):
    first = run(corpus)
    assert run(corpus)["kept_rows"] == first["kept_rows"] == 7
    with pytest.raises(UserError, match="holds files of something else"):
        run(corpus, min_characters=4)
