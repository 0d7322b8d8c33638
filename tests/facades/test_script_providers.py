"""Megatron-LM's provider functions, of several releases, under layouts."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.facades.script_providers import datasets_of_provider, model_builder, reporting_tensors
from megatron.training.providers import SampleCounts, Stage

COUNTS = SampleCounts(10, 4, 2)


@pytest.mark.parametrize(("encoder", "named"), [(None, set()), (2, {"add_encoder", "add_decoder"})])
def test_only_a_model_with_two_stacks_is_told_about_them(encoder: int | None, named: set[str]) -> None:
    given: dict[str, Any] = {}
    context = mock.Mock()
    context.config.transformer.num_encoder_layers = encoder
    model_builder(lambda **keywords: given.update(keywords))(context, Stage(add_decoder=False))
    assert {name for name in given if name.startswith("add_")} == named and given.get("add_decoder") is not True


def test_one_chunk_asks_once():
    calls: list[Any] = []

    def provider(counts: list[int]) -> tuple[Any, ...]:
        calls.append(counts)
        return "train", None, "test"

    assert datasets_of_provider(provider, COUNTS, [None]) == ["train", None, "test"]
    assert calls == [[10, 4, 2]]


def test_chunks_read_what_the_first_of_them_is_given():
    """Like Megatron-LM's, which build on the first and the last stage only."""
    calls: list[int | None] = []

    def provider(counts: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
        calls.append(vp_stage)
        return ("train", None, f"test {vp_stage}") if vp_stage else (None, None, "test 0")

    assert datasets_of_provider(provider, COUNTS, [0, 1, 2]) == ["train", None, "test 0"]
    assert calls == [0, 1, 2]
    assert datasets_of_provider(provider, COUNTS, [None]) == [None, None, "test 0"]


def test_a_datasets_provider_without_virtual_stages_is_called_once():
    calls: list[list[int]] = []

    def provider(counts: list[int]) -> tuple[Any, ...]:
        calls.append(counts)
        return "train", None, "test"

    assert datasets_of_provider(provider, COUNTS, [0, 1]) == ["train", None, "test"] and len(calls) == 1


def test_a_model_provider_needs_virtual_stages():
    def my_provider(pre_process: bool = True, post_process: bool = True) -> Any:
        raise AssertionError

    with pytest.raises(UserError, match="the model provider my_provider has no parameter vp_stage"):
        model_builder(my_provider)(None, SimpleNamespace(virtual=0))  # type: ignore[arg-type]


ONE, TWO = torch.tensor(1.0), torch.tensor(2)
OUTPUT = torch.zeros(1)


def reported(result: Any, **keywords: Any) -> Any:
    def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        return OUTPUT, lambda output, **given: result

    _, loss_func = reporting_tensors(forward_step)(None, None)  # type: ignore[arg-type]
    return loss_func(OUTPUT, **keywords)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (ONE, [1.0]),
        (1.5, [1.5]),
        ((ONE, TWO), [1.0, 2.0]),
        ([3.0, 4], [3.0, 4.0]),
        (torch.tensor([5.0, 6.0], dtype=torch.float64), [5.0, 6.0]),
    ],
)
def test_reports_of_scripts_become_tensors(value: Any, expected: list[float]) -> None:
    for loss in ((ONE,), (ONE, 7)):
        *kept, report = reported((*loss, {"lm loss": value}))
        assert tuple(kept) == loss and report["lm loss"].tolist() == expected


def test_the_scale_of_a_mean_loss_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    def step(data: Any, model: Any) -> Any:
        return OUTPUT, lambda output: (ONE, {"lm loss": ONE})

    for _ in range(2):
        for size in (1, 3):
            _, loss_func = reporting_tensors(step, size)(None, None)  # type: ignore[arg-type]
            loss_func(OUTPUT)
    assert capsys.readouterr().out.count("multiplied by --context-parallel-size 3 here") == 1


def test_wrong_results_of_loss_functions_are_named() -> None:
    with pytest.raises(UserError, match="a loss function returned Tensor"):
        reported(ONE)
    with pytest.raises(UserError, match="report 'lm loss' of a loss function has 3 values"):
        reported((ONE, {"lm loss": torch.zeros(3)}))
    assert reported("anything", non_loss_data=True) == "anything"
