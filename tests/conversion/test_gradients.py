"""Gradients of imported models: those that autograd computes in transformers, mapped as the weights are."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion import test_bert, test_t5
from conversion.oracles import MODELS, make_model, outputs_of, save_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megatron.conversion.importing import import_model
from megatron.training.trained_model import load_trained_model
from tools.entry_scripts import build_model

_OF_FAMILIES = list({MODELS[name][0]: name for name in reversed(MODELS)}.values())
"""A model of each class of transformers."""


def quiet(sentence: str) -> None:
    pass


def decoder(name: str, folder: Path) -> Any:
    model = make_model(name)
    save_model(model, folder)
    return model


ORACLES: dict[str, Callable[[Path], Any]] = {
    **{name: partial(decoder, name) for name in reversed(_OF_FAMILIES)},
    **{name: lambda folder, model=model: test_t5.save_random(folder, *model) for name, model in test_t5.MODELS.items()},
    **{
        name: lambda folder, model=model: test_bert.save_random(model[0], folder, **model[1])
        for name, model in test_bert.MODELS.items()
    },
}
"""By name: the function that saves a model of transformers in float64 with random weights, and returns it."""


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """A mean over tokens, of which the gradients are large enough to be compared."""
    return 100.0 * cross_entropy(logits.flatten(0, 1), targets.flatten())


def imported(folder: Path, root: Path) -> nn.Module:
    import_model(folder, root, build_model, log=quiet)
    model: nn.Module = load_trained_model(build_model, root, changes=["--fp64"], log=quiet).model
    return model


@pytest.mark.fast("qwen 3 moe", "gpt-oss", "ModernBERT")
@pytest.mark.parametrize("name", ORACLES)
def test_gradients(name: str, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(5)
    tokens, written, targets = (torch.randint(1, 60, (2, 15), generator=draw) for _ in range(3))
    oracle = ORACLES[name](tmp_path / "theirs")
    ours = imported(tmp_path / "theirs", tmp_path / "ours")
    more = () if name in MODELS else (written,) if name in test_t5.MODELS else (None, torch.zeros_like(tokens))
    outputs = ours(tokens, *more)
    loss = loss_of(outputs[0] if isinstance(outputs, tuple) else outputs, targets)
    loss.backward()

    named = {"decoder_input_ids": written} if name in test_t5.MODELS else {}
    outputs = outputs_of(oracle, input_ids=tokens, use_cache=False, **named)
    expected = loss_of(outputs.logits if "logits" in outputs else outputs.prediction_logits, targets)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=0)
    for weight in oracle.parameters():
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    for key, buffer in oracle.named_buffers():
        if key.endswith("e_score_correction_bias"):  # a rule of its own trains it
            buffer.zero_()
    shutil.rmtree(tmp_path / "theirs")
    oracle.save_pretrained(tmp_path / "theirs")
    gradients = dict(imported(tmp_path / "theirs", tmp_path / "gradients").named_parameters())
    assert sum(bool(gradient.any()) for gradient in gradients.values()) > 10
    for key, weight in ours.named_parameters():
        found = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(found, gradients[key].detach(), atol=1e-9, rtol=1e-9, msg=key)
