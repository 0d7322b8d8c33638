"""The loss and the gradients of a small GPT at one place of a run, for tests of what must change no bit of them."""

import copy
from typing import Any

import torch
from support.kept_memory import kept_bytes
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.tokens import RngPosition, Tokens

ROWS = 2
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def recomputing(*modules: str) -> dict[str, Any]:
    """Returns the fields of a config that recomputes these modules."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def loss_of(model: GPTModel, micro_batch: int = 0) -> Tensor:
    """Returns the sum of the losses of `ROWS` rows, which are as long as the model allows."""
    length = model.max_sequence_length
    generator = torch.Generator().manual_seed(3 + micro_batch)
    ids = torch.randint(model.vocab_size, (ROWS, length + 1), generator=generator)
    tokens = Tokens(length, ROWS, random=RngPosition(seed=7, iteration=4, first_sample=6 + micro_batch))
    return model(ids[:, :-1], labels=ids[:, 1:].contiguous(), tokens=tokens).sum()


def gradients(model: GPTModel) -> dict[str, Tensor]:
    """Returns the loss and the gradients, by name."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_of_a_copy(model: GPTModel) -> dict[str, Tensor]:
    """Returns those of a copy, after the weights of the model itself are set to zero."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return gradients(twin)


def kept_by(model: GPTModel) -> int:
    """Returns the bytes that a forward pass keeps for backward."""
    return kept_bytes(lambda: loss_of(model))


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differing, differing
    assert all(value.abs().sum() > 0 for value in one.values())
