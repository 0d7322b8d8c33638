"""Weights come and go with the modules that use them.

A unit belongs to the smallest module that holds all its parameters, and to every module that lists one of them in
its attribute `borrowed_parameters` (a head that shares the embedding's weight). Before such a module's forward its
units are whole: gathers that the update began are waited for, sharded parameters are gathered. Sharded parameters
are released after forward, gathered again before the module's backward and released after it, always one module
ahead of their use. Nobody gathers for weight gradients: those are products of activations; so neither for a module
whose attribute `backward_reads_weights` is False, such as a table whose rows are picked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.autograd_callbacks import BackwardEndCallback, in_backward
from megatron.core.distributed.flat_buffer import Unit


@dataclass(frozen=True)
class User:
    """A module and the units that it reads."""

    module: nn.Module
    units: tuple[Unit, ...]

    @property
    def shards_weights(self) -> bool:
        return any(unit.shards_weights for unit in self.units)

    @property
    def reads_weights_in_backward(self) -> bool:
        return getattr(self.module, "backward_reads_weights", True)


def users_of(root: nn.Module, units: Sequence[Unit]) -> list[User]:
    """The modules that need units, in the order of the model's modules, which is that of their use."""
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
        needed.setdefault(_owner([chains[parameter] for parameter in parameters]), []).append(unit)
        for borrower in {module for parameter in parameters for module in borrowers.get(parameter, ())}:
            needed.setdefault(borrower, []).append(unit)
    return [User(module, tuple(needed[module])) for module in root.modules() if module in needed]


def backward_order(users: Sequence[User]) -> list[int]:
    """Numbers of users in the order in which their backwards begin: the last first, but a module before those inside
    it, such as a layer before its experts."""
    within = [set(user.module.modules()) for user in users]
    order: list[int] = []
    first = len(users)
    while first:
        end = first
        first -= 1
        # The outermost module that the last user stands in, and all that stand in it.
        while any(users[first].module in modules for modules in within[:first]):
            first -= 1
        order += [first, *(first + 1 + inner for inner in backward_order(users[first + 1 : end]))]
    return order


def _chains(module: nn.Module, above: tuple[nn.Module, ...]) -> Iterator[tuple[nn.Module, ...]]:
    """Every module of a model with those that it is below, outermost first."""
    yield (*above, module)
    for child in module.children():
        yield from _chains(child, (*above, module))


def _owner(chains: Sequence[tuple[nn.Module, ...]]) -> nn.Module:
    """The innermost module that is in all chains and has a forward of its own (a list of layers is not called); else
    the whole model."""
    common = [level[0] for level in zip(*chains, strict=False) if all(module is level[0] for module in level)]
    called = (m for m in reversed(common) if type(m).forward is not nn.Module.forward and not _is_list(m))
    return next(called, common[0])


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


class WeightHooks:
    """Hooks on the modules of one model chunk. While they are not enabled, weights are whole."""

    def __init__(self, root: nn.Module, units: Sequence[Unit], prefetch: bool) -> None:
        self.users = users_of(root, units)
        self.prefetch = prefetch
        self._backward_order = backward_order(self.users)
        self._handles: list[RemovableHandle] = []
        self._uses: dict[Unit, int] = dict.fromkeys(units, 0)
        """How many forwards or backwards are at it."""
        self._in_backward: dict[int, None] = {}
        """Numbers of the users whose backward is under way."""
        self._lingering: list[Unit] = []
        """Whole although nobody is at them: backward, which often comes next, begins with what forward ended with."""
        self._backward_end = BackwardEndCallback(self._backward_ended)

    @property
    def are_enabled(self) -> bool:
        return bool(self._handles)

    def enable(self) -> None:
        if self._handles:
            return
        for number, user in enumerate(self.users):
            self._hook(number, user)

    def _hook(self, number: int, user: User) -> None:
        has_backward = user.shards_weights and user.reads_weights_in_backward

        def before(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._take(number)
            if has_backward and torch.is_grad_enabled():
                self._after_backward(number, _differentiable((inputs, keywords)))

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            backward_follows = has_backward and torch.is_grad_enabled()
            if backward_follows:
                self._before_backward(number, _differentiable(output))
            self._give_back(number, lingers=backward_follows and number == len(self.users) - 1)

        self._handles.append(user.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        if user.shards_weights:
            # Also where recomputation leaves a forward by an exception, once it has what it needs.
            self._handles.append(user.module.register_forward_hook(after, always_call=True))

    def disable(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Around a use ----------------------------------------------------------------------------------------------------

    def _take(self, number: int) -> None:
        """Have a user's units whole, and begin to gather those of the one that comes next."""
        for unit in self.users[number].units:
            self._uses[unit] += 1
        self._end_lingering()
        for unit in self.users[number].units:
            unit.start_gather()
        if self.prefetch:
            self._gather_ahead(number)
        for unit in self.users[number].units:
            unit.finish_gather()

    def _gather_ahead(self, number: int) -> None:
        backward = in_backward()  # of this thread: another's may run beside it
        order = self._backward_order if backward else range(len(self.users))
        place = order.index(number) + 1
        if place == len(self.users):
            return
        following = order[place]
        if not backward or self.users[following].reads_weights_in_backward:
            for unit in self.users[following].units:
                unit.start_gather()

    def _give_back(self, number: int, lingers: bool = False) -> None:
        units = self.users[number].units
        for unit in units:
            self._uses[unit] -= 1
        self._lingering += units
        if not lingers:
            self._end_lingering()

    def _end_lingering(self) -> None:
        for unit in self._lingering:
            if not self._uses[unit]:
                unit.release()
        self._lingering.clear()

    # Around a user's backward ----------------------------------------------------------------------------------------

    def _before_backward(self, number: int, outputs: Sequence[Tensor]) -> None:
        readers: list[int] = []

        def begin(gradient: Tensor) -> None:
            self._backward_end.expect()
            for reader in readers:
                self._end_backward(reader)
            if number not in self._in_backward:
                self._in_backward[number] = None
                self._take(number)

        if outputs:
            register_multi_grad_hook(outputs, begin, mode="any")
        if len(outputs) == 1:
            outputs[0].readers = readers  # type: ignore[attr-defined]

    def _after_backward(self, number: int, inputs: Sequence[Tensor]) -> None:
        readers = getattr(inputs[0], "readers", None) if len(inputs) == 1 else None
        if readers is not None:
            # Another user's output: this one is done when that one begins, and is to make room for it before.
            readers.append(number)
        elif inputs:
            register_multi_grad_hook(inputs, lambda gradients: self._end_backward(number), mode="all")

    def _end_backward(self, number: int) -> None:
        if number in self._in_backward:
            del self._in_backward[number]
            self._give_back(number)

    def _backward_ended(self) -> None:
        """Release what nobody did: of users whose input needs no gradient, and what was gathered in vain."""
        for number in list(self._in_backward):
            self._end_backward(number)
        self.release_unused()

    def release_unused(self) -> None:
        """Release what was gathered ahead and not used."""
        for unit, uses in self._uses.items():
            if not uses:
                unit.release()


def _differentiable(value: Any) -> list[Tensor]:
    """The activations in a nest of tuples, lists and dictionaries that a gradient will reach."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad and not isinstance(value, nn.Parameter) else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _differentiable(item)]
    return []
