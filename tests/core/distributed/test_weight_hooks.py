"""Sharded weights are gathered before a module uses them, in the order of use, and freed afterwards."""

from collections.abc import Iterable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from megatron.core.distributed.weight_hooks import WeightHooks, WeightReader, _own_view, backward_order, weight_readers
from megatron.core.ops.fp8.quantize import note_largest, noted_largest


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(1, 1)
        self.experts = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


def test_the_last_begins_first_and_a_module_before_those_inside_it() -> None:
    embedding, first, second, head = nn.Linear(1, 1), Layer(), Layer(), nn.Linear(1, 1)
    modules = [embedding, first, first.attention, first.experts, first.experts[0], second, second.experts, head]
    order = backward_order([WeightReader(module, ()) for module in modules])
    expected = [head, second, second.experts, first, first.experts, first.experts[0], first.attention, embedding]
    assert [modules[number] for number in order] == expected


class Recorded:
    """A unit that writes down what happens to its weights."""

    def __init__(self, name: str, parameters: Iterable[nn.Parameter], log: list[str]) -> None:
        self.name, self.log, self.shards_weights, self.is_whole = name, log, True, False
        self.reads = False
        """Whether it writes down reads from a file."""
        self.slots = [SimpleNamespace(parameter=parameter) for parameter in parameters]

    def start_all_gather(self) -> None:
        if not self.is_whole:
            self.log.append(f"gather {self.name}")
        self.is_whole = True

    def read_ahead(self) -> None:
        if self.reads:
            self.log.append(f"read {self.name}")

    def finish_all_gather(self) -> None:
        self.log.append(f"use {self.name}")

    def reshard(self) -> None:
        if self.is_whole:
            self.log.append(f"free {self.name}")
        self.is_whole = False


def hooked(prefetch: bool) -> tuple[nn.Sequential, list[Recorded], list[str], WeightHooks]:
    log: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    units = [Recorded(str(number), layer.parameters(), log) for number, layer in enumerate(model)]
    hooks = WeightHooks(model, units, prefetch)  # type: ignore[arg-type]
    hooks.enable()
    return model, units, log, hooks


def test_weights_are_gathered_around_each_use_and_freed_after_it() -> None:
    model, units, log, _ = hooked(prefetch=False)
    loss = model(torch.ones(1, 2, requires_grad=True)).sum()
    assert log == ["gather 0", "use 0", "free 0", "gather 1", "use 1", "free 1", "gather 2", "use 2"]
    log.clear()  # the last one is kept: its backward comes next
    loss.backward()
    assert log == ["use 2", "free 2", "gather 1", "use 1", "free 1", "gather 0", "use 0", "free 0"]
    assert not any(unit.is_whole for unit in units)


def test_with_prefetch_the_next_weights_are_gathered_before_the_use() -> None:
    model, units, log, _ = hooked(prefetch=True)
    loss = model(torch.ones(1, 2, requires_grad=True)).sum()
    assert log[:6] == ["gather 0", "gather 1", "use 0", "free 0", "gather 2", "use 1"]
    log.clear()
    loss.backward()
    assert log == ["gather 1", "use 2", "free 2", "gather 0", "use 1", "free 1", "use 0", "free 0"]
    assert not any(unit.is_whole for unit in units)


def test_the_next_shard_is_read_while_a_module_runs() -> None:
    for prefetch, forward, backward in ((False, "read 1 read 2", "read 1 read 0"), (True, "read 2", "read 0")):
        model, units, log, _ = hooked(prefetch)
        for unit in units:
            unit.reads = True
        loss = model(torch.ones(1, 2, requires_grad=True)).sum()
        assert " ".join(each for each in log if "read" in each) == forward
        assert log.index(forward[:6]) < log.index("use 0")
        log.clear()
        loss.backward()
        assert " ".join(each for each in log if "read" in each) == backward


class Joined(nn.Module):
    """Reads the states of the layer before and a table's rows, as a layer of multi-token prediction does."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(4, 2)

    def forward(self, states: Tensor, rows: Tensor) -> Tensor:
        return self.product(torch.cat([states, rows], -1))


class Predicting(nn.Module):
    """Layers in a chain, and a head that reads a view of what each of them returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Joined() for _ in range(3))
        self.head = nn.Linear(2, 1)

    def forward(self, states: Tensor, rows: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            states = layer(states, rows=rows)
            found.append(states.view(states.shape))
        return sum((self.head(view) for view in found), torch.zeros(1)).sum()


def test_each_use_in_backward_ends_before_that_of_the_layer_before_it_begins() -> None:
    """Although all layers read the same rows, and the head reads views that are older than the next layer's output."""
    model, log = Predicting(), []
    modules = {"0": model.layers[0], "1": model.layers[1], "2": model.layers[2], "h": model.head}
    units = [Recorded(name, module.parameters(), log) for name, module in modules.items()]
    WeightHooks(model, units, prefetch=False).enable()  # type: ignore[arg-type]
    loss = model(torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True))
    log.clear()
    loss.backward()
    assert [event for event in log if not event.startswith("use")] == [
        *("free h", "gather h", "free h", "gather h", "free h"),
        *("gather 2", "free 2", "gather 1", "free 1", "gather 0", "free 0"),
    ]


def test_without_a_gradient_nothing_stays_gathered() -> None:
    model, units, log, hooks = hooked(prefetch=True)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert log[-1] == "free 2" and not any(unit.is_whole for unit in units)
    hooks.disable()
    log.clear()
    model(torch.ones(1, 2))
    assert not hooks.are_enabled and log == []


def test_a_unit_is_read_by_the_smallest_module_that_holds_it_and_by_borrowers() -> None:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(3, 2), "layers": nn.ModuleList([Layer()]), "head": nn.Linear(2, 3)}
    )
    model.head.borrowed_parameters = [model.embedding.weight]
    layer = model.layers[0]
    units = [
        Recorded("embedding", model.embedding.parameters(), []),
        Recorded("experts", layer.experts.parameters(), []),
    ]
    readers = weight_readers(model, units)  # type: ignore[arg-type]
    assert [(reader.module, [unit.name for unit in reader.units]) for reader in readers] == [
        (model.embedding, ["embedding"]),
        (layer.experts, ["experts"]),
        (model.head, ["embedding"]),
    ]


def test_an_input_keeps_what_was_noted_about_it() -> None:
    """fp8 products read the largest value of their input there, and would otherwise read the whole input for it."""
    hidden = torch.ones(3, requires_grad=True) * 2
    note_largest(hidden, torch.tensor(2.0))
    view = _own_view(hidden)
    assert view is not hidden and noted_largest(view) is noted_largest(hidden) is not None
