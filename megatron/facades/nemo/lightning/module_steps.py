"""The functions of a module that a micro-batch runs: how it reads its data, computes, and makes a loss."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.tokens import RngPosition
from megatron.core.utils.rendezvous import local_device
from megatron.facades.nemo.lightning.arguments import Foreign
from megatron.facades.nemo.lightning.bases import defines
from megatron.training.data.batch import BatchRecord

Kind = Literal["training", "validation", "test", "predict"]

_WAYS = "training_step(batch), forward_step(batch) or forward_step(model, batch)"


class LightningIterator(Iterator[tuple[Foreign, int, int]]):
    """Yields (batch, batch_idx, dataloader_idx), as Lightning does to a step that takes its iterator. Batches of this
    package's data sets are dictionaries of tensors."""

    def __init__(self, data: Foreign) -> None:
        self.data = data
        self.drawn = 0

    def __next__(self) -> tuple[Foreign, int, int]:
        batch = next(self.data)
        self.drawn += 1
        if isinstance(batch, BatchRecord):
            batch = dict(vars(batch))
        return batch, self.drawn - 1, 0

    @property
    def rng_position(self) -> RngPosition | None:
        """Position in the run of the last batch, for dropout; None outside a run."""
        position: RngPosition | None = getattr(self.data, "rng_position", None)
        return position


@dataclass(frozen=True)
class StepFunctions:
    """The functions of a kind of step. `None` in MegatronParallel's arguments means those of the module."""

    data_step: Callable[[Foreign], Foreign]
    forward_step: Callable[[nn.Module, nn.Module, Foreign], Foreign]
    """Gets the module, the network to call, and the batch; returns the output."""
    loss_reduction: Callable[[nn.Module], Foreign]


def functions_of(module: nn.Module, kind: Kind) -> StepFunctions:
    """Returns the functions that a module defines for a kind of step. One with the kind in its name
    (`validation_data_step`, `validation_step`, `validation_loss_reduction`) comes before the common one (`data_step`,
    `forward_step`, `loss_reduction`). Raises UserError if there is no forward step or no loss reduction."""
    data = _first_defined(module, f"{kind}_data_step", "data_step")
    forward = _first_defined(module, f"{kind}_step", f"{kind}_forward_step", "forward_step")
    loss = _first_defined(module, f"{kind}_loss_reduction", "loss_reduction")
    if forward is None and kind != "training":  # an evaluation without a step of its own
        forward = _first_defined(module, "training_step")
    owner = type(module).__name__
    if forward is None:
        raise UserError(f"{owner}: no step for {kind}; define {_WAYS}")
    if loss is None:
        raise UserError(f"{owner}: no loss for {kind}; define loss_reduction(), or {kind}_loss_reduction()")
    return StepFunctions(
        default_data_step if data is None else getattr(module, data),
        named_forward_step(forward),
        named_loss_reduction(loss),
    )


def _first_defined(module: nn.Module, *names: str) -> str | None:
    return next((name for name in names if defines(module, name)), None)


def named_forward_step(name: str) -> Callable[[nn.Module, nn.Module, Foreign], Foreign]:
    """Returns the forward step `name` of a module: a method that takes a batch, (batch, batch_idx), or (model, batch).
    `model` is the module itself if it has a forward of its own, otherwise the network."""

    def forward(module: nn.Module, network: nn.Module, batch: Foreign) -> Foreign:
        method = getattr(module, name)
        if name == "forward_step" and len(_required(method)) > 1:
            return method(module if defines(module, "forward") else network, batch)
        return method(batch, 0) if len(_required(method)) > 1 else method(batch)

    return forward


def named_loss_reduction(name: str) -> Callable[[nn.Module], Foreign]:
    """Returns the function that gives a module's loss reduction: a property, a method, or a method that takes the
    module."""

    def reduction(module: nn.Module) -> Foreign:
        found = getattr(module, name)
        if isinstance(found, nn.Module) or hasattr(found, "reduce"):
            return found
        return found(module) if _required(found) else found()

    return reduction


def _required(function: Callable[..., object]) -> list[str]:
    """Returns the names of the parameters of a function that have no default and are given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in kinds and each.default is inspect.Parameter.empty]


def default_data_step(dataloader_iter: Iterator[Foreign]) -> Foreign:
    """Returns the next batch on the device of this process."""
    found = next(dataloader_iter)
    batch = found[0] if isinstance(found, tuple) and len(found) == 3 else found
    return to_device(batch)


def to_device(batch: Foreign) -> Foreign:
    """Returns a batch with its tensors on the device of this process, those in dictionaries, lists and tuples too."""
    if isinstance(batch, Tensor | BatchRecord):
        return batch.to(local_device(), non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(map(to_device, batch))
    return batch
