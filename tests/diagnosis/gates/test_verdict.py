"""The line, the exit code and the JSON of a verdict."""

import json
from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.diagnosis.gates.verdict import Outcome, Verdict


def test_each_outcome_has_its_exit_code() -> None:
    codes = {outcome: Verdict("loss", outcome, "").exit_code for outcome in Outcome}
    assert codes == {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.UNSURE: 3}


def test_the_line_names_kinds_and_reason() -> None:
    verdict = Verdict("loss", Outcome.FAIL, "it rises", ("divergence", "spikes"))
    assert verdict.line == "FAIL loss [divergence or spikes]: it rises"


def test_json_has_the_figures(tmp_path: Path) -> None:
    Verdict("memory", Outcome.PASS, "it fits", figures={"percent": 40.0}, steps=[3]).write(tmp_path / "a/v.json")
    content = json.loads((tmp_path / "a/v.json").read_text())
    assert content["outcome"] == "PASS" and content["figures"] == {"percent": 40.0} and content["steps"] == [3]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        Verdict("loss", Outcome.PASS, "").write(tmp_path)
