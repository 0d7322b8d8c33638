"""Module hooks that gather sharded weights before a module uses them and free them afterwards (ZeRO-3).

A unit is read by the smallest module that holds all its parameters, and by every module that lists one of them in its
attribute `borrowed_parameters` (for example a head that shares the embedding's weight). Before the forward of such a
module its units are whole: the hooks wait for all-gathers that the optimizer's update started, and gather sharded
parameters. Sharded parameters are freed after forward, gathered again before the module's backward, and freed after it.
With prefetch, the weights of a module are gathered while the module before it runs.

Weight gradients are products of activations and need no weights. A module whose input gradient needs no weights either,
such as a table whose rows are selected, sets its attribute `backward_reads_weights` to False.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.flat_buffer import Unit
from megatron.core.utils.torch_private import BackwardEndCallback, in_backward


@dataclass(frozen=True)
class WeightReader:
    """A module and the units whose weights it reads."""

    module: nn.Module
    units: tuple[Unit, ...]

    @property
    def shards_weights(self) -> bool:
        """Whether any of the units has sharded parameters."""
        return any(unit.shards_weights for unit in self.units)

    @property
    def reads_weights_in_backward(self) -> bool:
        """Whether the module needs its weights to compute its input gradient."""
        return getattr(self.module, "backward_reads_weights", True)


def weight_readers(root: nn.Module, units: Sequence[Unit]) -> list[WeightReader]:
    """Returns the modules that read units, in the order of the model's modules, which is the order of use."""
    chains: dict[nn.Parameter, tuple[nn.Module, ...]] = {}
    borrowers: dict[nn.Parameter, list[nn.Module]] = {}
    for chain in _chains(root, ()):
        for parameter in chain[-1].parameters(recurse=False):
            chains.setdefault(parameter, chain)
        for parameter in getattr(chain[-1], "borrowed_parameters", ()):
            borrowers.setdefault(parameter, []).append(chain[-1])
    needed: dict[nn.Module, list[Unit]] = {}
    for unit in units:
        parameters = [slot.parameter for slot in unit.slots]
        needed.setdefault(_home([chains[parameter] for parameter in parameters]), []).append(unit)
        for borrower in {module for parameter in parameters for module in borrowers.get(parameter, ())}:
            needed.setdefault(borrower, []).append(unit)
    return [WeightReader(module, tuple(needed[module])) for module in root.modules() if module in needed]


def backward_order(readers: Sequence[WeightReader]) -> list[int]:
    """Returns the indices of readers in the order in which their backwards start.

    This is the last reader first, except that a module comes before the modules inside it, such as a layer before its
    experts.
    """
    within = [set(reader.module.modules()) for reader in readers]
    order: list[int] = []
    first = len(readers)
    while first:
        end = first
        first -= 1
        # Find the outermost reader that contains the last one; it and all readers inside it form one block.
        while any(readers[first].module in modules for modules in within[:first]):
            first -= 1
        order += [first, *(first + 1 + inner for inner in backward_order(readers[first + 1 : end]))]
    return order


def _chains(module: nn.Module, above: tuple[nn.Module, ...]) -> Iterator[tuple[nn.Module, ...]]:
    """Yields every module of a model at the end of the chain of modules that contain it, outermost first."""
    yield (*above, module)
    for child in module.children():
        yield from _chains(child, (*above, module))


def _home(chains: Sequence[tuple[nn.Module, ...]]) -> nn.Module:
    """Returns the innermost module in all chains that has a forward of its own (a list of layers is never called), or
    the whole model if there is none."""
    common = [level[0] for level in zip(*chains, strict=False) if all(module is level[0] for module in level)]
    called = (m for m in reversed(common) if type(m).forward is not nn.Module.forward and not _is_list(m))
    return next(called, common[0])


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


class WeightHooks:
    """The hooks on the modules of one model chunk. While they are disabled, no parameters may be sharded."""

    def __init__(self, root: nn.Module, units: Sequence[Unit], prefetch: bool) -> None:
        self.readers = weight_readers(root, units)
        self.prefetch = prefetch
        self._backward_order = backward_order(self.readers)
        self._handles: list[RemovableHandle] = []
        self._num_uses: dict[Unit, int] = dict.fromkeys(units, 0)
        """Number of forward and backward passes that currently use the unit."""
        self._in_backward: dict[object, int] = {}
        """Calls whose backward is running, and the indices of their readers. A module may be called several times."""
        self._kept: list[Unit] = []
        """Unused units that stay gathered: backward often comes next and starts with the last module of forward."""
        self._backward_end = BackwardEndCallback(self._backward_ended)

    @property
    def are_enabled(self) -> bool:
        """Whether the hooks are on the modules."""
        return bool(self._handles)

    def enable(self) -> None:
        """Puts the hooks on the modules."""
        if self._handles:
            return
        for number, reader in enumerate(self.readers):
            self._hook(number, reader)

    def _hook(self, number: int, reader: WeightReader) -> None:
        has_backward = reader.shards_weights and reader.reads_weights_in_backward
        running: list[object] = []  # the calls of this module that have not ended, the innermost last

        def before(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
            call = object()
            running.append(call)
            self._unshard(number)
            if has_backward and torch.is_grad_enabled():
                inputs = tuple(_own_view(value) for value in inputs)
                keywords = {name: _own_view(value) for name, value in keywords.items()}
                self._after_backward(call, _differentiable((inputs, keywords)))
            return inputs, keywords

        def after(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            call, backward_follows = running.pop(), has_backward and torch.is_grad_enabled()
            if backward_follows:
                self._before_backward(number, call, _differentiable(output))
            self._finish_use(number, keep=backward_follows and number == len(self.readers) - 1)

        self._handles.append(reader.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        if reader.shards_weights:
            # Called always: recomputation ends a forward by an exception as soon as it has what it needs.
            self._handles.append(reader.module.register_forward_hook(after, always_call=True))

    def disable(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Around a use ----------------------------------------------------------------------------------------------------

    def _unshard(self, number: int) -> None:
        """Gathers the units of a reader, and starts to gather those of the next one."""
        for unit in self.readers[number].units:
            self._num_uses[unit] += 1
        self._reshard_kept()
        for unit in self.readers[number].units:
            unit.start_all_gather()
        if self.prefetch:
            for unit in self._following(number, 1):
                unit.start_all_gather()
        for unit in self._following(number, 2 if self.prefetch else 1):
            unit.read_ahead()
        for unit in self.readers[number].units:
            unit.finish_all_gather()

    def _following(self, number: int, distance: int) -> Sequence[Unit]:
        """Returns the units that the reader at this distance after a reader will gather."""
        backward = in_backward()
        order = self._backward_order if backward else range(len(self.readers))
        position = order.index(number) + distance
        if position >= len(self.readers):
            return ()
        following = self.readers[order[position]]
        return following.units if not backward or following.reads_weights_in_backward else ()

    def _finish_use(self, number: int, keep: bool = False) -> None:
        units = self.readers[number].units
        for unit in units:
            self._num_uses[unit] -= 1
        self._kept += units
        if not keep:
            self._reshard_kept()

    def _reshard_kept(self) -> None:
        for unit in self._kept:
            if not self._num_uses[unit]:
                unit.reshard()
        self._kept.clear()

    # Around a reader's backward --------------------------------------------------------------------------------------

    def _before_backward(self, number: int, call: object, outputs: Sequence[Tensor]) -> None:
        def begin(gradient: Tensor) -> None:
            self._backward_end.expect()
            if call not in self._in_backward:
                self._in_backward[call] = number
                self._unshard(number)

        if outputs:
            register_multi_grad_hook(outputs, begin, mode="any")

    def _after_backward(self, call: object, inputs: Sequence[Tensor]) -> None:
        if inputs:
            register_multi_grad_hook(inputs, lambda gradients: self._end_backward(call), mode="all")

    def _end_backward(self, call: object) -> None:
        if call in self._in_backward:
            self._finish_use(self._in_backward.pop(call))

    def _backward_ended(self) -> None:
        """Frees units that are still gathered: those of readers whose input needs no gradient, and unused
        prefetches."""
        for call in list(self._in_backward):
            self._end_backward(call)
        self.reshard_unused()

    def reshard_unused(self) -> None:
        """Frees units that were gathered ahead and not used."""
        for unit, uses in self._num_uses.items():
            if not uses:
                unit.reshard()


def _own_view(value: object) -> object:
    """Returns a view of an activation with a gradient, and any other value as it is.

    The gradient of the view is that of one call, and autograd computes it before it goes on to the module that made the
    activation. The activation's own gradient may come much later: if other modules read it too, or if it was made long
    before the call. The view has the activation's attributes: fp8 products read the largest value there.
    """
    if not isinstance(value, Tensor) or not _differentiable(value):
        return value
    view = value.view_as(value)
    vars(view).update(vars(value))
    return view


def _differentiable(value: object) -> list[Tensor]:
    """Returns the activations with a gradient in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad and not isinstance(value, nn.Parameter) else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _differentiable(item)]
    return []
