"""--measure: what a trial runs, and how measured times change a plan."""

import json
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.measuring import Trial, measure, step_seconds, trial_words, with_measurements
from megatron.diagnosis.planning.plan import Plan, make_plan
from megatron.diagnosis.planning.specification import read_specification
from megatron.diagnosis.planning.specification_text import Answer, Answers

VALUES = {
    "params": "10M", "gpus": "4", "gpu": "H100 80GB", "seq_length": "256", "tokens": "20M", "tensor_parallel": "2",
    "tokenizer": "NullTokenizer (1000)", "pipeline_parallel": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(read_specification(Answers({name: Answer(text, name) for name, text in VALUES.items()})))


def test_a_trial_keeps_the_micro_batches_of_a_rank(plan: Plan) -> None:
    layout = plan.chosen.layout
    words = trial_words(plan, layout, 2, Path("metrics"))
    assert words is not None and "--mock-data" in words
    batch = int(words[len(words) - words[::-1].index("--global-batch-size")])
    assert layout.data == 2 and batch * 2 == plan.values.global_batch_size
    assert trial_words(plan, layout, 1, Path("metrics")) is None


def test_measured_times_decide(plan: Plan) -> None:
    first, second, *others = plan.ranking.best
    trials = [Trial(first, 2.0, "measured: 2 s"), Trial(second, 1.0, "measured: 1 s")]
    trials += [Trial(other, None, "not tried: x") for other in others]
    found = with_measurements(plan, trials)
    assert [each.layout for each in found.ranking.best[:2]] == [second.layout, first.layout]
    settings = {setting.field: setting.reason for setting in found.sections()["layout"]}
    assert "measured: 1 s" in settings["micro_batch_size"]
    assert {loser.reason for loser in found.ranking.losers} >= ({"not tried: x"} if others else set())
    with pytest.raises(UserError, match="no layout could be measured; the first: not tried: y"):
        with_measurements(plan, [Trial(first, None, "not tried: y")])


def test_times_of_steps_after_the_warm_up(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert step_seconds(path) == []
    path.write_text("".join(json.dumps({"iteration": i, "ms per iteration": 100.0 * i}) + "\n" for i in range(1, 6)))
    assert step_seconds(path) == pytest.approx([0.3, 0.4, 0.5])


def test_a_script_that_is_not_there(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pretrain_gpt.py does not exist; start this in the folder of"):
        next(measure(plan, tmp_path / "pretrain_gpt.py", 2))


PROGRAM = """
import runpy, sys
if sys.argv[sys.argv.index("--pipeline-model-parallel-size") + 1] != "1":
    sys.exit("error: no pipelines here")
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_trials_run_and_one_that_fails_is_told(tmp_path: Path) -> None:
    values = VALUES | {"params": "1M", "gpus": "2", "seq_length": "64", "tokens": "1M"}
    del values["tensor_parallel"], values["pipeline_parallel"]
    specification = read_specification(Answers({name: Answer(text, name) for name, text in values.items()}))
    planned = make_plan(specification, 8, wanted=5)
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(PROGRAM.format(path=str(Path(pretrain_gpt.__file__))))
    trials = list(measure(planned, script, 2))
    failed = [trial for trial in trials if trial.candidate.layout.pipeline > 1]
    assert len(trials) == 5 and 0 < len(failed) < 5
    assert {trial.reason for trial in failed} == {"failed with exit code 1: error: no pipelines here"}
    times = {trial.seconds: trial.candidate.layout for trial in trials if trial.seconds is not None}
    assert len(times) == 5 - len(failed)
    found = with_measurements(planned, trials)
    assert found.chosen.layout == times[min(times)]
    assert found.ranking.best[-1].layout == failed[-1].candidate.layout
