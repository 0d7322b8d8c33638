"""Pages are plain English in lines that fit: what a program can check of CONTRIBUTING.md's "Words"."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "tests/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
LONGEST = 120

RIDDLES = (
    *("whoever", "whosever", "whatever", "as it were", "that which", "those which", "what stands there", "of what is"),
    *("of one that", "is at home", "have it that", "so to speak", "'s affair", "is at it", "somebody", "nobody asks"),
    *("speaks of", "is told to", "at last", "no number any more", "in the place of", "knob", "knobs"),
)
"""Words and turns that made readers stop. Plain ones exist for all of them."""


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a page with their numbers, without code, tables and comments."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "<!--")):
            yield number, line


def too_long(text: str) -> list[int]:
    return [number for number, line in prose(text) if len(line) > LONGEST]


def riddles(text: str) -> list[str]:
    """Found in prose and in tables, across line breaks, outside of code."""
    words = re.sub(r"\s+", " ", without_code(text)).lower()
    return [riddle for riddle in RIDDLES if re.search(rf"(?<!\w){re.escape(riddle)}(?!\w)", words)]


@pytest.mark.parametrize(
    "page",
    PAGES,
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_page_is_plain(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not too_long(text), f"lines over {LONGEST} characters: {too_long(text)}"
    assert not riddles(text)
    assert text.startswith("# ") and not re.search(r"[ \t]$", text, flags=re.M)


def test_a_long_line_and_a_riddle_are_found() -> None:
    long = "word " * 30
    text = f"# Title\n\n{long}\n| {long} |\n```\n{long}\n```\nWhoever\nreads this, that\nwhich `whatever` is.\n"
    assert too_long(text) == [3]
    assert riddles(text) == ["whoever", "that which"]


def test_links_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        text = without_code(page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, heading = target.partition("#")
            if "://" in target:
                continue
            linked = (page.parent / path).resolve() if path else page
            if not linked.exists() or (heading and heading not in headings(linked)):
                dead.append(f"{page.name}: {target}")
    assert not dead


def without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    lines = (line for _, line in prose(page.read_text(encoding="utf-8")) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-") for line in lines}


BEGINNINGS = tuple('"""' + word + " " for word in ("Of", "As", "The same", "Also", "Undo", "See"))
"""Docstrings begin with what a function returns or does, and not with a reference to something else."""

IN_CODE = ("whoever", "whosever", "whatever", "somebody", "as it were", "so to speak", "speaks of")
"""The words of `RIDDLES` that no code has for another reason."""


def words_to_replace(code: str) -> list[str]:
    lower = code.lower()
    return [word for word in BEGINNINGS if word in code] + [word for word in IN_CODE if f" {word}" in lower]


def test_docstrings_and_comments_are_plain() -> None:
    code = [
        path
        for folder in ("megatron", "tools", "benchmarks", "tests", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    code += ROOT.glob("*.py")
    found = {path: words_to_replace(path.read_text(encoding="utf-8")) for path in code if path != Path(__file__)}
    assert not {path: words for path, words in found.items() if words}


def test_words_to_replace_are_found_in_code() -> None:
    quotes = '"' * 3
    assert words_to_replace(f"{quotes}As g, but faster.{quotes}") == [f"{quotes}As "]
    assert words_to_replace(f"# Whatever the order\n{quotes}Assigns.{quotes}") == ["whatever"]
