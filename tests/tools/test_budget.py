"""tools/budget.py: numbers with units, and a sentence for each mistake."""

import pytest

from tools.budget import main


@pytest.mark.parametrize("words", ["--params 8e9 --tokens 15e12", "--params 8B --tokens 15T"])
def test_it_prints_a_budget(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "--gpus", "1024", "--gpu", "h200"]) == 0
    out = capsys.readouterr().out
    assert "1,875 tokens per parameter" in out and "NVIDIA H200" in out


def test_a_recipe_gives_the_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", "llama3-8b", "--tokens", "15e12", "--law", "hoffmann2022"]) == 0
    out = capsys.readouterr().out
    assert "8.03 billion parameters" in out and "constants as published" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "give one or two of --params, --tokens and --gpu-hours"),
        ("--params many", "--params: many: expected a number from 1000 to 1e+18, such as 8e9 or 8B"),
        ("--params=-1e9", "--params: -1e9: expected a number"),
        ("--params nan", "--params: nan: expected a number"),
        ("--params 1e99", "--params: 1e99: expected a number"),
        ("--params 8e9 --mfu 40", "--mfu: 40: expected a number from 0.001 to 1, such as 0.4"),
        ("--params 8e9 --gpus 1.5", "--gpus: 1.5: expected a whole number from 1 to 10000000, such as 1024"),
        ("--params 8e9 --gpu c64", "--gpu c64: no such GPU"),
        ("--recipe llama3-8", "--recipe llama3-8: no such recipe; did you mean llama3-8b?"),
        ("--recipe llama3-8b --params 8e9", "give --recipe or --params, not both"),
        ("--param 8e9", "unrecognized arguments: --param 8e9"),
    ],
)
def test_mistakes(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence}")
