"""`make docs` builds a site of all pages, and a link that leads nowhere is an error."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(tree: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=600)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that the site is made of, in a folder of their own. Links to others need them to exist, too."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra docs)")
    copy = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


@pytest.mark.slow
def test_the_site(tree: Path, tmp_path: Path) -> None:
    done = build(tree, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {page.stem for page in (ROOT / "docs").rglob("*.md")} - {"README"}
    assert {folder.name for folder in (tmp_path / "site").rglob("*") if (folder / "index.html").exists()} >= pages
    index = json.loads((tmp_path / "site/search/search_index.json").read_text())["docs"]
    by_place = {entry["location"]: entry["text"] for entry in index}
    assert any(place.startswith("flags/") and "--num-layers" in text for place, text in by_place.items())
    assert "Iterations, numbered" in "".join(text for place, text in by_place.items() if place.startswith("flags/"))
    reference = (tmp_path / "site/reference/megatron.core.models.gpt.gpt_model/index.html").read_text()
    assert "GPTModel.forward" in reference and "attention_mask" in reference
    (tree / "tests/data/megatron_lm_api.json").write_text("[]")  # its pages take most of the time
    (tree / "docs/api.md").write_text("[a page](no_such_page.md) and [a heading](data.md#no-such-heading)\n")
    done = build(tree, tmp_path / "again")
    assert done.returncode == 1 and "no_such_page.md" in done.stderr and "no-such-heading" in done.stderr
