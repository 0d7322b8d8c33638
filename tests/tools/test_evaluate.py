"""tools/evaluate.py: the scores of a run's log, from its checkpoint and from its export; lm-evaluation-harness."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import Outcome, train

from megatron.conversion.exporting import export_model
from megatron.training.evaluation.scoring import continuations
from megatron.training.evaluation.tasks import prepare_tasks
from tools import evaluate as tool
from tools.entry_scripts import build_model

ROOT = Path(__file__).parents[2]
BPE = ROOT / "tests/data/golden/corpus/gpt2bpe"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 96 --max-position-embeddings 96 "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr 1e-2 --mock-data --num-workers 0 --eval-iters 0 "
    f"--fp64 --init-method-std 0.3 --vocab-file {BPE}/vocab.json --merge-file {BPE}/merges.txt"
)
DOCUMENTS = [
    {
        "question": "The capital of France is",
        "choices": ["Paris", "Rome, in Italy", "Berlin"],
        "answer": 0,
        "text": "Paris is the capital.   It is big.\n\nIt lies on a river. " * 4,
    },
    {"question": "Two and two are", "choices": ["four", "five"], "answer": 0, "text": "One two three four, é five."},
    {"question": "The sky is ", "choices": ["green", "blue", "a long wrong answer"], "answer": 1, "text": "Blue sky"},
    {"question": "Fish live in", "choices": ["trees", "the sea"], "answer": 1, "text": "The sea is deep. " * 20},
]
PROMPT = {"doc_to_text": "Q: {{question}}\nA:", "data": "documents.jsonl"}
TASKS: list[dict[str, Any]] = [
    {"task": "texts", "output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}", "data": "documents.jsonl"},
    {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "num_fewshot": 1,
        **PROMPT,
    },
    {
        "task": "no-prompt",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "data": "documents.jsonl",
    },
    {
        "task": "cloze",
        "output_type": "loglikelihood",
        "doc_to_target": "{{choices[answer]}}",
        "description": "Answer.\n",
        "num_fewshot": 2,
        "fewshot_delimiter": "\n",
        **PROMPT,
    },
    {
        "task": "greedy-cloze",
        "output_type": "loglikelihood",
        "doc_to_target": " {{greedy}}",
        **PROMPT,
    },
    {
        "task": "written",
        "output_type": "generate_until",
        "doc_to_target": "{{greedy}}",
        **PROMPT,
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3},
    },
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run that saved, evaluated and exported its model. Two documents hold what the model writes."""
    folder = tmp_path_factory.mktemp("run")
    path = write_tasks(folder, ["no"] * 4)
    train(f"{FLAGS} --save {folder}/checkpoints", base="")
    config = tool.EvaluateConfig(load=f"{folder}/checkpoints", eval_tasks=str(path))
    predictor, tokenizer, _ = tool.open_model(config)
    (prepared,) = (each for each in prepare_tasks(str(path), tokenizer, 96) if each.task.task == "written")
    texts = continuations(prepared, predictor, tokenizer, [])
    write_tasks(folder, [texts[0].strip(), "no", texts[2].strip(), "no"])
    export_model(folder / "checkpoints", folder / "hf", build_model, verify=False)
    load = f"--load {folder}/checkpoints --save {folder}/again --skip-train"
    return folder, train(f"{FLAGS} {load} --eval-tasks {path}", base="")


def write_tasks(folder: Path, greedy: list[str]) -> Path:
    documents = [{**document, "greedy": text} for document, text in zip(DOCUMENTS, greedy, strict=True)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "tasks.json").write_text(json.dumps(TASKS))
    return folder / "tasks.json"


def scores(run: Outcome) -> dict[str, dict[str, tuple[float, float | None]]]:
    return {record.task: dict(record.scores) for record in run.tasks}


@pytest.mark.parametrize("model", ["load", "hf-dir"])
def test_the_tool_finds_the_scores_of_the_loop(
    run: tuple[Path, Outcome], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, outcome = run
    where = folder / {"load": "checkpoints", "hf-dir": "hf"}[model]
    words = [f"--{model}", str(where), "--eval-tasks", str(folder / "tasks.json"), "--batch-size", "3"]
    assert tool.main([*words, "--output", str(folder / f"{model}.json")]) == 0
    printed = capsys.readouterr().out
    found = json.loads((folder / f"{model}.json").read_text())["tasks"]
    for task, by_metric in scores(outcome).items():
        assert f"task {task} | " in printed
        for metric, pair in by_metric.items():
            assert [found[task][metric][key] for key in ("value", "stderr")] == pytest.approx(pair, rel=1e-9), metric
    assert found["written"]["exact_match"]["value"] == found["greedy-cloze"]["acc"]["value"] == 0.5


METRICS = {
    "loglikelihood_rolling": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
    "multiple_choice": ["acc", "acc_norm"],
    "loglikelihood": ["perplexity", "acc"],
    "generate_until": ["exact_match"],
}


@pytest.mark.slow
def test_scores_are_those_of_lm_evaluation_harness(
    run: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    for variable in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path))
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, outcome = run
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float64)
    harness = HFLM(
        pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder / "hf"), max_length=96, device="cpu"
    )
    results = lm_eval.simple_evaluate(harness, tasks=[as_in_harness(task, folder) for task in TASKS], bootstrap_iters=2)
    compared = 0
    for task, by_metric in scores(outcome).items():
        found = {name.partition(",")[0]: value for name, value in results["results"][task].items()}
        for metric in METRICS[next(each["output_type"] for each in TASKS if each["task"] == task)]:
            value, error = by_metric[metric]
            assert value == pytest.approx(found[metric], rel=1e-9), (task, metric)
            if metric in ("acc", "acc_norm"):
                assert error == pytest.approx(found[f"{metric}_stderr"], rel=1e-9)
            compared += 1
    assert compared == 12


def as_in_harness(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the task in the harness's own format."""
    same = {key: value for key, value in task.items() if key != "data"}
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}}}
    splits = {"test_split": "test", "fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}}
    metrics = {"metric_list": [{"metric": metric} for metric in METRICS[task["output_type"]]]}
    strip = {"name": "strip", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
    written = {"filter_list": [strip]} if task["output_type"] == "generate_until" else {}
    return {"doc_to_text": "", **same, **data, **splits, **metrics, **written}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output", "{0}/no/scores.json"), "--output {0}/no/scores.json must be a file in a folder that exists"),
        (("--batch-size", "0"), "--batch-size 0 must be at least 1"),
        (("--max-length", "97"), "--max-length 97: the model has 96 positions; give no more"),
    ],
)
def test_a_bad_flag_is_one_sentence_before_the_first_score(
    run: tuple[Path, Outcome], words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = run
    given = [word.format(folder) for word in words]
    assert tool.main(["--load", f"{folder}/checkpoints", "--eval-tasks", f"{folder}/tasks.json", *given]) == 2
    assert capsys.readouterr() == ("", f"error: {message.format(folder)}\n")
