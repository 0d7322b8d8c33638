"""Evaluation tasks and the moving average of weights in bf16, beside CUDA graphs."""

import json
from pathlib import Path

import pytest
import torch
from support.gpu_runs import DETERMINISTIC, GRAPHS
from support.runs import train

from tools import evaluate as tool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

RUN = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 5 --lr 1e-3 --eval-iters 0 --bf16 --mock-data "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 1000 --num-workers 0 "
    "--ema-decay 0.5"
)
TASKS = [
    {"task": "texts", "output_type": "loglikelihood_rolling", "data": "d.jsonl"},
    {
        "task": "written",
        "output_type": "generate_until",
        "data": "d.jsonl",
        "doc_to_text": "text",
        "doc_to_target": "text",
        "generation_kwargs": {"until": [" 7"], "max_gen_toks": 4},
    },
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    texts = [" ".join(str((start + step * at) % 1000) for at in range(60)) for start, step in ((1, 1), (5, 7), (9, 30))]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "tasks.json").write_text(json.dumps(TASKS))
    return tmp_path / "tasks.json"


def test_scores_of_a_run_are_those_of_its_checkpoint(tasks: Path, tmp_path: Path) -> None:
    run = train(f"--eval-tasks {tasks} --save {tmp_path / 'saved'}", base=RUN)
    found = {record.task: dict(record.scores) for record in run.tasks}
    assert [*found] == ["texts", "written", "texts-ema", "written-ema"]
    assert found["texts"] != found["texts-ema"]
    for ema in (False, True):
        config = tool.EvaluateConfig(
            load=str(tmp_path / "saved"), eval_tasks=str(tasks), batch_size=2, max_length=128, ema=ema
        )
        for scores in tool.evaluate(config):
            for metric, pair in scores.pairs.items():
                assert found[scores.task + "-ema" * ema][metric] == pytest.approx(pair, rel=1e-6), (metric, ema)


def test_graphs_average_the_weights_as_eager_updates_do() -> None:
    eager = train(DETERMINISTIC, base=RUN)
    graphed = train(" ".join([DETERMINISTIC, *GRAPHS, "--optimizer-cuda-graph"]), base=RUN)
    averages = {name: value for name, value in eager.at_end.items() if ".ema." in name}
    assert averages
    for name, value in averages.items():
        assert torch.equal(graphed.at_end[name], value), name
