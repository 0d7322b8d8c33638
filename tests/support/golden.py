"""Reference values of small models that Megatron-LM computed: names, shapes, logits, losses and gradients.

The files are in tests/data/golden.
"""

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
    """The reference values of one model in a folder of tests/data/golden."""

    folder: str
    name: str

    @cached_property
    def info(self) -> dict[str, Any]:
        return json.loads((_DATA / self.folder / "info.json").read_text())[self.name]

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes in the state dict, by name."""
        return {key: shape for key, shape in self.info["state_dict"] if not key.endswith("_extra_state")}

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Returns the tensors of one kind: `weights`, `io` or `grads`."""
        return load_file(_DATA / self.folder / f"{self.name}.{kind}.safetensors")

    def check_outputs(self, model: GPTModel) -> None:
        """Checks logits and losses. Leaves the gradients of the masked mean loss in the model."""
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
        """Checks outputs (`check_outputs`), and the name and gradient of every parameter."""
        self.check_outputs(model)
        megatron_lm = self.tensors("grads")
        assert {key for key, _ in model.named_parameters()} == set(megatron_lm)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            close(key, parameter.grad, megatron_lm[key])


def close(name: str, ours: Tensor, megatron_lm: Tensor) -> None:
    """Checks that shape and type are equal, and values up to the rounding of float32 sums."""
    assert ours.shape == megatron_lm.shape and ours.dtype == megatron_lm.dtype, name
    error = (ours - megatron_lm).abs().max() / megatron_lm.abs().max()
    assert error < 1e-5, (name, error.item())


def shapes_of(model: torch.nn.Module) -> dict[str, list[int]]:
    """Returns the shapes in the state dict of a model."""
    return {key: list(value.shape) for key, value in model.state_dict().items()}
