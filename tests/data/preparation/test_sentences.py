"""megatron/data/preparation/sentences.py: sentences by rules and by punkt."""

import pickle
import sys
import time

import pytest

from megatron.data.preparation.sentences import PunktSplitter, RuleSplitter, build_splitter

SENTENCES = [
    ["Dr. Smith met J. R. Jones at 5 p.m. on Jan. 3.", "He paid $3.50!", "Really?", "Yes."],
    ["It costs approx. 3.5 million.", "The U.S. Army agreed (see Fig. 2).", "“So do I.”", "Then they left."],
    ['"Stop!" she cried.', "What?!", "Nobody moved...", "A pause."],
    ["1. Wash the rice.", "2. Cook it."],
    ["今日は晴れ。", "明日も？", "「はい。」", "終わり"],
    ["यह एक वाक्य है।", "यह दूसरा है।"],
    ["No end mark here"],
]


@pytest.mark.parametrize("sentences", SENTENCES, ids=lambda sentences: sentences[0])
def test_rules_find_sentences(sentences):
    between = "" if "今" in sentences[0] else " "
    assert RuleSplitter().split(between.join(sentences)) == sentences


def test_blank_lines_end_sentences_and_single_newlines_do_not():
    text = "A title\n \nOne sentence\nover two lines. Another one.\n\n\n  Last"
    assert RuleSplitter().split(text) == ["A title", "One sentence\nover two lines.", "Another one.", "Last"]
    kept = RuleSplitter(keep_newlines=True).split(text)
    assert kept == ["A title\n \n", "One sentence\nover two lines. ", "Another one.\n\n\n  ", "Last"]
    assert "".join(kept) == text


@pytest.mark.parametrize("text", ["", " \n\n ", "\u3000"])
def test_blanks_are_no_sentence(text):
    assert RuleSplitter().split(text) == RuleSplitter(keep_newlines=True).split(text) == []


@pytest.mark.parametrize("text", ["." * 300_000, "a." * 150_000, '."' * 150_000, " \n" * 150_000, "x" * 300_000])
def test_endless_text_takes_linear_time(text):
    began = time.process_time()
    RuleSplitter().split(text)
    assert time.process_time() - began < 2


@pytest.fixture
def nltk_data(tmp_path, monkeypatch):
    """A folder with punkt's tables for a language in which `blabla.` is an abbreviation."""
    punkt = pytest.importorskip("nltk.tokenize.punkt")
    folder = tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name, content in (
        ("collocations.tab", ""),
        ("sent_starters.txt", ""),
        ("abbrev_types.txt", "blabla\n"),
        ("ortho_context.tab", ""),
    ):
        (folder / name).write_text(content)
    monkeypatch.setattr("nltk.data.path", [str(tmp_path / "nltk_data")])
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))
    return punkt


def test_punkt_is_used_where_its_data_is(nltk_data):
    warnings: list[str] = []
    splitter = build_splitter("english", False, warnings.append)
    assert isinstance(splitter, PunktSplitter) and splitter.name == "nltk punkt, english" and warnings == []
    text = "He is a blabla. Smith. Dr. Jones came.  \n\nThe end."
    expected = ["He is a blabla. Smith.", "Dr.", "Jones came.", "The end."]
    assert splitter.split(text) == expected == nltk_data.PunktTokenizer("english").tokenize(text)
    assert pickle.loads(pickle.dumps(splitter)).split(text) == expected
    kept = build_splitter("english", True, warnings.append).split(text)
    assert "".join(kept) == text and [part.strip() for part in kept] == expected


def test_punkt_gets_parts_of_a_million_characters(nltk_data):
    text = "One. " + "x" * 999_999 + " yz. Two."
    assert PunktSplitter("english", False).split(text) == ["One.", "x" * 999_995, "xxxx yz.", "Two."]


def test_without_punkt_rules_are_used_and_a_warning_says_so(nltk_data, monkeypatch):
    warnings: list[str] = []
    assert isinstance(build_splitter("german", True, warnings.append), RuleSplitter)
    assert len(warnings) == 1 and "no tokenizers/punkt_tab/german in NLTK_DATA=" in warnings[0]
    assert "found by rules, not by nltk's punkt" in warnings[0] and "know English abbreviations only" in warnings[0]
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    build_splitter("english", False, warnings.append)
    assert "nltk is not installed" in warnings[1] and "English" not in warnings[1]
