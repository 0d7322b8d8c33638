"""--eval-tasks in a run: the same scores in every layout, in the log and in files; bad input before the first step."""

import json
import re
from pathlib import Path

import pytest
from support.processes import run_on_ranks
from support.runs import Outcome, logger_of, train, train_on_ranks

from megatron.core.exceptions import UserError
from megatron.training.log.jsonl import read_metrics

LINES = [
    {
        "text": " ".join(str((first * step + 3 * at) % 40) for at in range(length)),
        "first": first,
        "next": (first + 3) % 40,
    }
    for first, step, length in ((1, 1, 9), (5, 2, 23), (7, 3, 40), (11, 1, 2), (2, 2, 5))
]
TASKS = [
    {"task": "texts", "output_type": "loglikelihood_rolling", "data": "lines.jsonl"},
    {
        "task": "choices",
        "output_type": "multiple_choice",
        "data": "lines.jsonl",
        "doc_to_text": "{{first}} {{first + 1}}",
        "doc_to_choice": ["{{next}}", "{{next}} 1", "2 3 4"],
        "doc_to_target": "{{ 0 }}",
        "num_fewshot": 1,
        "fewshot_delimiter": " 39 ",
    },
    {
        "task": "cloze",
        "output_type": "loglikelihood",
        "data": "lines.jsonl",
        "doc_to_text": "{{first}} {{first + 1}}",
        "doc_to_target": " {{next}} 4",
        "target_delimiter": "",
        "fewshot_delimiter": " 39 ",
    },
    {
        "task": "written",
        "output_type": "generate_until",
        "data": "lines.jsonl",
        "doc_to_text": "first",
        "doc_to_target": "next",
        "generation_kwargs": {"until": [" 7"], "max_gen_toks": 4},
    },
]
RUN = "--mock-data --train-iters 2 --eval-interval 1 --fp64 --eval-micro-batch-size 4 --eval-global-batch-size 16"


def write_tasks(folder: Path, tasks: object = TASKS) -> Path:
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    path = folder / "tasks.json"
    path.write_text(json.dumps(tasks))
    return path


def scores(outcome: Outcome) -> dict[tuple[int, str], dict[str, tuple[float, float | None]]]:
    return {(record.iteration, record.task): dict(record.scores) for record in outcome.tasks}


def train_with(flags: list[str]) -> list[Outcome]:
    return [train(each) for each in flags]


LAYOUTS = {
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "dp2": "--use-distributed-optimizer",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    path = write_tasks(tmp_path_factory.mktemp("tasks"))
    metrics = path.parent / "metrics.jsonl"
    return path, train(f"{RUN} --eval-tasks {path} --metrics-path {metrics}")


def test_every_layout_gives_the_scores_of_one_process(alone: tuple[Path, Outcome]) -> None:
    path, one = alone
    expected = scores(one)
    assert [*expected] == [(iteration, task["task"]) for iteration in (1, 2) for task in TASKS]
    once = f"{RUN} --train-iters 1 --eval-tasks {path}"
    ranks = run_on_ranks(train_with, 2, [f"{once} {layout}" for layout in LAYOUTS.values()])
    for number, layout in enumerate(LAYOUTS):
        found = scores(logger_of([outcomes[number] for outcomes in ranks]))
        assert [*found] == [*expected][: len(TASKS)], layout
        for key, values in found.items():
            assert values.keys() == expected[key].keys()
            for metric, pair in values.items():
                assert expected[key][metric] == pytest.approx(pair, rel=1e-10), (layout, key, metric)


def test_scores_are_lines_of_the_metrics_file(alone: tuple[Path, Outcome]) -> None:
    path, one = alone
    lines = read_metrics(path.parent / "metrics.jsonl").tasks
    assert [(line["iteration"], line["task"]) for line in lines] == [*scores(one)]
    value, error = scores(one)[2, "choices"]["acc_norm"]
    assert (lines[5]["acc_norm"], lines[5]["acc_norm stderr"], lines[5]["documents"]) == (value, error, 5)


def test_the_average_of_the_weights_has_scores_of_its_own(alone: tuple[Path, Outcome]) -> None:
    path, _ = alone
    found = scores(train(f"{RUN} --train-iters 1 --eval-tasks {path} --ema-decay 0.5"))
    names = [str(task["task"]) for task in TASKS]
    assert [name for _, name in found] == [*names, *(f"{name}-ema" for name in names)]
    assert found[1, "texts"] != found[1, "texts-ema"]


MANY = {
    "tp2-pp2-vpp2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-layers-per-virtual-pipeline-stage 1",
    "ep2-cp2": "--num-experts 4 --moe-grouped-gemm --expert-model-parallel-size 2 --context-parallel-size 2",
    "ep2-capacity": "--num-experts 4 --expert-model-parallel-size 2 --moe-expert-capacity-factor 1.0",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_every_layout_of_four_ranks_gives_the_scores_of_one_process(tmp_path: Path, name: str) -> None:
    path = write_tasks(tmp_path)
    model = " ".join(re.findall("--(?:num-layers|num-experts|moe-expert-capacity-factor) \\S+", MANY[name]))
    run = f"{RUN} --eval-tasks {path} --micro-batch-size 2 --global-batch-size 8"
    expected = scores(train(f"{run} {model}"))
    found = scores(logger_of(train_on_ranks(f"{run} {MANY[name]}", 4)))
    for key, values in expected.items():
        for metric, pair in values.items():
            assert found[key][metric] == pytest.approx(pair, rel=1e-9), (key, metric)


def test_a_bad_document_ends_the_run_before_its_model_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tasks(tmp_path, [TASKS[0], TASKS[2] | {"num_fewshot": 4}])
    with pytest.raises(
        UserError, match=r"--eval-tasks: .*lines.jsonl line 1: task cloze asks about 23 tokens, but the"
    ):
        train(f"{RUN} --eval-tasks {path} --save {tmp_path / 'saved'}")
    assert "this process holds" not in capsys.readouterr().out
    with pytest.raises(UserError, match="--eval-tasks: a BERT does not predict the next token of a text; leave it out"):
        train(f"{RUN} --eval-tasks {path}", defaults={"model_family": "bert"})
    with pytest.raises(UserError, match=r"--eval-tasks: .*tasks.json: task 1: 'texts' is not a mapping"):
        train(f"{RUN} --eval-tasks {write_tasks(tmp_path, ['texts'])}")
