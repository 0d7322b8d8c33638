"""Scores of evaluation tasks from a model's predictions, with standard errors; the definitions of
lm-evaluation-harness."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.evaluation.requests import PreparedTask, Question, Row
from megatron.data.tokenizer.base import Tokenizer
from megatron.training.evaluation.predictor import Prediction, Predictor


@dataclass(frozen=True)
class Score:
    """A number and its standard error."""

    value: float
    error: float | None
    """Standard error of the mean over documents; None for a single document."""


@dataclass(frozen=True)
class TaskScores:
    """The scores of one task."""

    task: str
    scores: Mapping[str, Score]
    """By metric; the first is the main one."""
    documents: int

    @property
    def pairs(self) -> dict[str, tuple[float, float | None]]:
        """Values with their standard errors, by metric."""
        return {metric: (score.value, score.error) for metric, score in self.scores.items()}


@dataclass(frozen=True)
class RowScore:
    """What a model says about the scored tokens of a row."""

    log_likelihood: float
    is_greedy: bool
    """Whether each of these tokens is the likeliest."""


def score_task(prepared: PreparedTask, predictor: Predictor, tokenizer: Tokenizer, ends: Collection[int]) -> TaskScores:
    """Returns the scores of a task, the same on every rank. Collective. `ends` are the ids that end a generated
    text."""
    task, questions = prepared.task, prepared.questions
    if task.output_type == "generate_until":
        texts = continuations(prepared, predictor, tokenizer, ends)
        matches = [
            text.strip() == str(question.answer).strip() for text, question in zip(texts, questions, strict=True)
        ]
        return TaskScores(task.task, {"exact_match": mean(matches)}, len(questions))
    rows = [row for question in questions for row in question.rows]
    scored = iter([row_score(row, each) for row, each in zip(rows, predictor([row.ids for row in rows]), strict=True)])
    by_question = [[next(scored) for _ in question.rows] for question in questions]
    return TaskScores(task.task, _METRICS[task.output_type](questions, by_question), len(questions))


def row_score(row: Row, prediction: Prediction) -> RowScore:
    """Returns the score of a row's scored tokens."""
    asked = list(row.ids[-row.scored :])
    is_greedy = prediction.likeliest[-row.scored :].tolist() == asked
    return RowScore(float(prediction.log_probs[-row.scored :].sum()), is_greedy)


def _whole_texts(questions: Sequence[Question], scores: Sequence[Sequence[RowScore]]) -> dict[str, Score]:
    losses = [-sum(row.log_likelihood for row in rows) for rows in scores]
    num_bytes = [question.num_bytes[0] for question in questions]
    num_tokens = [sum(row.scored for row in question.rows) for question in questions]
    per_byte = ratio(losses, num_bytes)
    return {
        "bits_per_byte": _mapped(per_byte, lambda nats: nats / math.log(2.0), lambda nats: 1.0 / math.log(2.0)),
        "perplexity": _exponential(ratio(losses, num_tokens)),
        "byte_perplexity": _exponential(per_byte),
        "word_perplexity": _exponential(ratio(losses, [question.num_words for question in questions])),
    }


def _multiple_choice(questions: Sequence[Question], scores: Sequence[Sequence[RowScore]]) -> dict[str, Score]:
    hits: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_norm_tokens": []}
    for question, rows in zip(questions, scores, strict=True):
        sums = np.array([row.log_likelihood for row in rows])
        sizes = {"acc": 1.0, "acc_norm": np.maximum(question.num_bytes, 1)}
        sizes["acc_norm_tokens"] = np.array([row.scored for row in question.rows])
        for name, size in sizes.items():
            hits[name].append(int(np.argmax(sums / size)) == question.answer)
    return {name: mean(found) for name, found in hits.items()}


def _cloze(questions: Sequence[Question], scores: Sequence[Sequence[RowScore]]) -> dict[str, Score]:
    losses = mean([-rows[0].log_likelihood for rows in scores])
    return {"acc": mean([rows[0].is_greedy for rows in scores]), "perplexity": _exponential(losses)}


_METRICS: Mapping[str, Callable[[Sequence[Question], Sequence[Sequence[RowScore]]], dict[str, Score]]] = {
    "loglikelihood_rolling": _whole_texts,
    "multiple_choice": _multiple_choice,
    "loglikelihood": _cloze,
}

# ---------------------------------------------------------------------------------------------------------------------
# Generated text


def continuations(
    prepared: PreparedTask, predictor: Predictor, tokenizer: Tokenizer, ends: Collection[int]
) -> list[str]:
    """Returns the text that the model writes after each prompt: always the likeliest token, until a text of `until` or
    an id of `ends`. Collective.

    Every token takes a forward over the whole row, which works in every layout without a cache.
    """
    task = prepared.task
    prompts = [list(question.rows[0].ids) for question in prepared.questions]
    written: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    for _ in range(task.max_gen_toks):
        if not running:
            break
        found = predictor([[*prompts[number], *written[number], 0] for number in running])
        kept = []
        for number, prediction in zip(running, found, strict=True):
            token = int(prediction.likeliest[-1])
            if token in ends:
                continue
            written[number].append(token)
            text = tokenizer.detokenize(written[number])
            if not any(stop in text for stop in task.until):
                kept.append(number)
        running = kept
    return [_up_to(tokenizer.detokenize(ids), task.until) for ids in written]


def _up_to(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.split(stop)[0]
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Means


def mean(values: Sequence[float]) -> Score:
    """Returns the mean, and its standard error from the sample variance."""
    return ratio(values, [1.0] * len(values))


def ratio(values: Sequence[float], weights: Sequence[float]) -> Score:
    """Returns sum(values) / sum(weights) over documents, and its standard error to first order (the delta method)."""
    x, w = np.asarray(values, np.float64), np.asarray(weights, np.float64)
    value, count = float(x.sum() / w.sum()), len(x)
    if count < 2:
        return Score(value, None)
    variance = float(np.square(x - value * w).sum()) * count / (count - 1)
    return Score(value, math.sqrt(variance) / float(w.sum()))


def _mapped(score: Score, function: Callable[[float], float], slope: Callable[[float], float]) -> Score:
    error = None if score.error is None else score.error * slope(score.value)
    return Score(function(score.value), error)


def _exponential(score: Score) -> Score:
    def exponential(value: float) -> float:
        return math.inf if value > 700.0 else math.exp(value)  # nan stays nan

    return _mapped(score, exponential, exponential)
