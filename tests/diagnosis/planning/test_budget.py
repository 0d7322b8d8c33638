"""Budgets: hours and prices by hand, the published ratios, and smaller models the more a model is used."""

import pytest

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.budget import Rates, budget, budget_lines
from megatron.diagnosis.planning.gpus import gpu_named
from megatron.diagnosis.planning.scaling_laws import CORRECTED

H100 = Rates(gpu_named("h100"), mfu=0.4, inference_mfu=0.4, price_per_hour=2.0)


def test_llama_3_8b_by_hand() -> None:
    found = budget(H100, parameters=8e9, tokens=15e12)
    assert found.asked.ratio == 1875 and found.asked.flops == 7.2e23
    assert found.asked.hours == pytest.approx(7.2e23 / (989.4e12 * 0.4) / 3600, rel=1e-12)
    assert found.cheapest_to_train.loss == pytest.approx(found.asked.loss, rel=1e-9)
    assert found.cheapest_to_train.hours < found.asked.hours / 5 and found.best_of_compute.loss < found.asked.loss
    assert found.best_of_compute.flops == pytest.approx(7.2e23) and found.cheapest_to_use is None


@pytest.mark.parametrize("parameters", [3e9, 70e9])
def test_parameters_alone_get_about_twenty_tokens_each(parameters: float) -> None:
    found = budget(H100, parameters=parameters)
    assert 18 < found.asked.ratio < 22
    assert found.best_of_compute.parameters == pytest.approx(parameters) == found.cheapest_to_train.parameters
    assert budget(H100, tokens=found.asked.tokens).asked.parameters == pytest.approx(parameters)


def test_hours_alone_and_with_a_size() -> None:
    alone = budget(H100, gpu_hours=1.3e6)
    assert alone.asked.hours == pytest.approx(1.3e6) and alone.asked.parameters == alone.best_of_compute.parameters
    sized = budget(H100, parameters=8e9, gpu_hours=505_357)
    assert sized.asked.tokens == pytest.approx(15e12, rel=1e-5)
    assert budget(H100, tokens=15e12, gpu_hours=505_357).asked.parameters == pytest.approx(8e9, rel=1e-5)


def test_the_more_a_model_is_used_the_smaller_it_is() -> None:
    used = [budget(H100, parameters=30e9, inference_tokens=tokens).cheapest_to_use for tokens in (1e11, 1e13, 1e15)]
    sizes = [cost.parameters for cost in used if cost is not None]
    assert len(sizes) == 3 and sizes == sorted(sizes, reverse=True) and sizes[0] < 30e9
    assert all(
        cost.loss == pytest.approx(CORRECTED.loss(30e9, CORRECTED.optimal_tokens(30e9))) for cost in used if cost
    )
    dear = Rates(H100.gpu, mfu=0.4, inference_mfu=0.1, price_per_hour=2.0)
    expensive = budget(dear, parameters=30e9, inference_tokens=1e13).cheapest_to_use
    assert expensive is not None and expensive.parameters < sizes[1]


def test_nothing_and_everything_are_refused() -> None:
    for given in ({}, {"parameters": 1e9, "tokens": 1e10, "gpu_hours": 1.0}):
        with pytest.raises(UserError, match="give one or two of --params, --tokens and --gpu-hours"):
            budget(H100, **given)


def test_the_report_names_every_assumption() -> None:
    text = "\n".join(budget_lines(budget(H100, 8e9, 15e12, None, 1e13), H100, CORRECTED, 1024))
    for words in (
        "1,875 tokens per parameter", "20.6 days on 1,024 GPUs", "1,010,714 to train", "--mfu", "--inference-mfu",
        "--price-per-hour", "--gpu", "arXiv:2203.15556", "arXiv:2404.10102", "arXiv:2001.08361", "arXiv:2401.00448",
    ):  # fmt: skip
        assert words in text, words
