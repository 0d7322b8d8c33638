"""Which implementation of an operation a device gets, and what a record says of its operations."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Self

import torch
from torch import Tensor

from megatron.core.backends import LOCAL
from megatron.core.ops.records import ByDevice, Ops, on_gpus, operation

KERNELS = ModuleType("kernels")
KERNELS.mul_triton = torch.multiply  # type: ignore[attr-defined]


def test_the_device_of_the_first_tensor_decides() -> None:
    operation = ByDevice(cpu=lambda *arguments: "cpu", cuda=lambda *arguments: "cuda")
    assert operation(3, torch.zeros(1)) == "cpu"
    assert operation(SimpleNamespace(), torch.zeros(1), None) == "cpu"


@dataclass(frozen=True)
class ScaleOps(Ops):
    layer_scale: Callable[..., Tensor] = operation(torch.mul, "layer scales")

    @classmethod
    def by_triton(cls) -> Self:
        return on_gpus(cls(), KERNELS)


def test_an_operation_and_its_name_in_the_log_are_an_affair_of_its_record() -> None:
    ours = ScaleOps.by_triton()
    assert (ours.layer_scale.cpu, ours.layer_scale.cuda) == (torch.mul, torch.multiply)  # type: ignore[attr-defined]
    assert [list(ours.subjects(device)) for device in ("cpu", "cuda")] == [[], ["layer scales"]]
    assert not list(ScaleOps().subjects("cuda"))
    backend = dataclasses.replace(LOCAL, name="mine", norms=ours)
    assert backend.describe("cuda") == "backend mine: plain torch except layer scales"


def test_kernels_that_note_largest_values_are_beside_the_others() -> None:
    ours = ScaleOps.by_triton().with_noting("layer_scale")
    noting = ours.noting["layer_scale"]
    assert (noting.cpu, noting.cuda.keywords) == (torch.mul, {"notes_largest": True})
    assert ours.layer_scale.cuda is torch.multiply  # type: ignore[attr-defined]
