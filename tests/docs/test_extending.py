"""The examples of docs/extending.md run and print what the page says."""

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.M | re.S)


class Example(NamedTuple):
    """A file of the page, the words that run it, and what it prints."""

    source: str
    words: list[str]
    environment: dict[str, str]
    printed: str


def examples() -> dict[str, Example]:
    sources = {text.splitlines()[0].removeprefix("# "): text for kind, text in BLOCKS if kind == "python"}
    flags, found = "", {}
    for (kind, text), following in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if kind != "sh":
            continue
        if text.startswith("FLAGS="):
            (flags,) = (word.removeprefix("FLAGS=") for word in shlex.split(text))
            continue
        words = shlex.split(text.replace("$FLAGS", flags))
        environment = dict(word.split("=", 1) for word in words[: words.index("python")])
        name, *rest = words[words.index("python") + 1 :]
        printed = following[1] if following[0] == "text" else ""
        found[name] = Example(sources[name], rest, environment, printed)
    assert found.keys() == sources.keys(), "every example is run"
    return found


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES[name]
    (tmp_path / name).write_text(example.source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *example.words])
    for variable, value in example.environment.items():
        monkeypatch.setenv(variable, value)
    runpy.run_path(str(tmp_path / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert example.printed in printed
    assert re.search(EXPECTED.get(name, ""), printed, flags=re.S), printed
    if name == "list_checkpoints.py":
        lines = (tmp_path / "listed/saved.txt").read_text().splitlines()
        assert [line.split()[0] for line in lines] == ["2", "4"]


EXPECTED = {
    "layer_scale.py": "agrees",
    "my_backend.py": r"iteration +4/ +4 .*\n[1-9]\d+ norms computed by backend mine: plain torch except norms",
    "average_attention.py": r"iteration +4/ +4 .* lm loss: ",
    "freeze_layers.py": r"this stage trains \d+ parameters\n.*iteration +4/",
    "hard_tokens.py": r"iteration +1/ .* hard tokens: .* validation loss .* hard tokens",
    "active_channels.py": r"iteration +4/ .* lm loss: \S+ \| active channels: [1-9]\.\d+E-01 ",
    "triangle.py": r"learning rate: 1\.000000E-03.*learning rate: 5\.500000E-03.*learning rate: 1\.000000E-02",
}
"""What a run prints, where the page does not show it."""
