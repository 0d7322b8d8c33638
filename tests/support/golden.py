"""Small models of the published release, tests/data/golden: its own names, shapes, logits, losses and gradients."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.core.models.gpt import GPTModel

_DATA = Path(__file__).parents[1] / "data" / "golden"


@dataclass(frozen=True)
class Golden:
    """A model of a folder."""

    folder: str
    name: str

    @cached_property
    def info(self) -> dict[str, Any]:
        return json.loads((_DATA / self.folder / "info.json").read_text())[self.name]

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of the state dict."""
        return {key: shape for key, shape in self.info["state_dict"] if not key.endswith("_extra_state")}

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """`weights`, `io` or `grads`."""
        return load_file(_DATA / self.folder / f"{self.name}.{kind}.safetensors")

    def check_outputs(self, model: GPTModel) -> None:
        """Its logits and losses are the published ones; the masked mean's gradients are left in it."""
        io = self.tensors("io")
        inputs = {"input_ids": io["tokens"], "position_ids": io["position_ids"], "attention_mask": None}
        close("logits", model(**inputs), io["logits"])
        loss = model(**inputs, labels=io["labels"])
        close("loss", loss, io["loss"])
        mask = io["loss_mask"]
        mean = (loss * mask).sum() / mask.sum()
        close("masked mean", mean, io["masked_mean_loss"][0])
        mean.backward()

    def check_all(self, model: GPTModel) -> None:
        """`check_outputs`, and every parameter's gradient, under its published name."""
        self.check_outputs(model)
        published = self.tensors("grads")
        assert {key for key, _ in model.named_parameters()} == set(published)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            close(key, parameter.grad, published[key])


def close(name: str, ours: Tensor, published: Tensor) -> None:
    """The same shape and type, and the same numbers as far as the order of sums in float32 allows."""
    assert ours.shape == published.shape and ours.dtype == published.dtype, name
    error = (ours - published).abs().max() / published.abs().max()
    assert error < 1e-5, (name, error.item())


def shapes_of(model: torch.nn.Module) -> dict[str, list[int]]:
    """Of its state dict."""
    return {key: list(value.shape) for key, value in model.state_dict().items()}
