"""Means with standard errors, and texts that end where the task says."""

import numpy as np
import pytest
import torch

from megatron.data.evaluation.requests import PreparedTask, Question, Row
from megatron.data.evaluation.task_file import EvaluationTask
from megatron.data.tokenizer.null import NullTokenizer
from megatron.training.evaluation.predictor import Prediction
from megatron.training.evaluation.scoring import continuations, mean, ratio, score_task

TASK = EvaluationTask("t", "generate_until", "d.jsonl", generation_kwargs={"until": [" 7"], "max_gen_toks": 4})


class Counting:
    """Predicts the number after each token."""

    max_length = 100

    def __call__(self, rows):
        return [Prediction(-torch.arange(1.0, len(row)).double(), torch.tensor(row[:-1]) + 1) for row in rows]


def test_the_error_of_a_mean_is_that_of_its_sample() -> None:
    values = np.random.default_rng(0).normal(size=40)
    score = mean(values)
    assert (score.value, score.error) == pytest.approx((values.mean(), values.std(ddof=1) / np.sqrt(40)))
    assert mean([3.0]).error is None


def test_the_error_of_a_ratio_is_its_spread_over_samples_of_documents() -> None:
    random = np.random.default_rng(1)
    weights = random.integers(5, 50, size=(4000, 60)).astype(float)
    values = 2.0 * weights + random.normal(size=weights.shape) * weights
    found = [ratio(x, w) for x, w in zip(values, weights, strict=True)]
    spread = np.std([score.value for score in found])
    assert np.mean([score.error for score in found]) == pytest.approx(spread, rel=0.03)


def test_a_text_ends_at_a_stop_an_end_or_after_its_last_token() -> None:
    rows = [Question((Row((first,)),), str(first + 1)) for first in (5, 1, 9)]
    texts = continuations(PreparedTask(TASK, tuple(rows)), Counting(), NullTokenizer(40), ends=[12])
    assert texts == ["6", "2 3 4 5", "10 11"]
    scores = score_task(PreparedTask(TASK, tuple(rows)), Counting(), NullTokenizer(40), [12])
    assert scores.pairs["exact_match"][0] == pytest.approx(1 / 3)


def test_a_likelihood_that_is_no_number_gives_no_perplexity() -> None:
    class Broken(Counting):
        def __call__(self, rows):
            return [Prediction(each.log_probs * np.nan, each.likeliest) for each in super().__call__(rows)]

    task = EvaluationTask("t", "loglikelihood", "d.jsonl")
    prepared = PreparedTask(task, (Question((Row((1, 2), 1),)),))
    scores = score_task(prepared, Broken(), NullTokenizer(40), []).pairs
    assert np.isnan(scores["perplexity"][0])


def test_choices_are_compared_by_sum_by_bytes_and_by_tokens() -> None:
    # Counting gives the n-th token of a row the log-probability -n.
    rows = (Row((1, 2, 3), 1), Row((1, 2, 3), 2), Row((1, 2, 3, 4, 5), 4))  # sums -2, -3, -10
    question = Question(rows, 0, (1, 2, 50))  # by bytes -2, -1.5, -0.2; by tokens -2, -1.5, -2.5
    task = EvaluationTask("t", "multiple_choice", "d.jsonl", doc_to_choice="c")
    scores = {
        answer: score_task(
            PreparedTask(task, (Question(rows, answer, question.num_bytes),)), Counting(), NullTokenizer(40), []
        ).pairs
        for answer in range(3)
    }
    right = {metric: [answer for answer in range(3) if scores[answer][metric][0]] for metric in scores[0]}
    assert right == {"acc": [0], "acc_norm": [2], "acc_norm_tokens": [1]}
