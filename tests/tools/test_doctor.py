"""tools/doctor.py: a sentence for each mistake."""

import pytest

from tools.doctor import main


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--wait never", "--wait: never: expected a number from 1 to 3600, such as 60"),
        ("--fold x", "unrecognized arguments: --fold x"),
        ("--folder", "--folder: expected one argument"),
    ],
)
def test_mistakes(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and capsys.readouterr().err == f"error: {sentence}\n"


def test_wrong_variables_of_a_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: WORLD_SIZE 'many'")
