"""The work of a micro-batch on one rank: products, attention, and bytes that memory-bound operations move. A
memory-bound operation counts as reading its inputs once and writing its outputs once."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Product:
    """A linear layer of a micro-batch: [rows, inputs] x [outputs, inputs]."""

    rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    fp8: bool = False
    experts: bool = False
    """Whether the rows are divided among experts; timed as one product of the same FLOPs."""
    weights: int = 1
    """Number of weights that are cast to fp8."""
    backward: tuple[bool, bool] = (True, True)
    """Whether the gradients of the inputs and of the weight are computed."""

    @property
    def flops(self) -> float:
        """Floating point operations of one product."""
        return 2.0 * self.rows * self.inputs * self.outputs

    def describe(self) -> str:
        """Returns the sizes, and how they are multiplied."""
        kind = "fp8" if self.fp8 else str(self.dtype).removeprefix("torch.")
        return f"{self.rows} x {self.inputs} x {self.outputs} {kind}" + (" (experts, as one)" if self.experts else "")


@dataclass(frozen=True)
class AttentionWork:
    """A call of an attention kernel."""

    queries: int
    """Tokens of this rank whose queries it computes."""
    keys: float
    """Mean number of keys that a query sees."""
    heads: int
    """Heads of this rank."""
    width: int
    """Channels of a query and of a key."""
    value_width: int
    blocks: int = 1
    """Number of kernel calls: a rank of a context parallel group computes attention block by block."""
    selects: bool = False
    """Whether an indexer selects keys for each query. `keys` is nevertheless the number of keys that the query sees:
    the kernel skips only tiles in which no query of 64 has selected a key."""

    @property
    def flops(self) -> float:
        """Floating point operations of forward. Backward has 2.5 times as many, because it computes the scores
        again."""
        return 2.0 * self.queries * self.keys * self.heads * (self.width + self.value_width)


@dataclass(frozen=True)
class Selection:
    """An indexer's choice of keys for attention. It scores all keys of a row for each query, also later ones."""

    queries: int
    keys: int
    heads: int
    width: int

    @property
    def pairs(self) -> int:
        """Number of scores."""
        return self.queries * self.keys

    @property
    def flops(self) -> float:
        """Floating point operations of the scores."""
        return 2.0 * self.pairs * self.heads * self.width


STATE_PRODUCTS: Mapping[str, int] = {"mamba": 2, "gated_delta_net": 3}
"""For each token mixer with a recurrent state: number of products of a token with the state of a head in forward.
Mamba-2 writes the state and reads it; the gated delta rule also reads what the state returns for the key."""


@dataclass
class Work:
    """The work of forward and backward."""

    products: Counter[Product] = field(default_factory=Counter)
    attention: Counter[AttentionWork] = field(default_factory=Counter)
    selections: Counter[Selection] = field(default_factory=Counter)
    forward_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that forward must move, by kind of operation."""
    backward_bytes: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    """Numbers of the recurrent states of all tokens, by kind of token mixer."""
    layers: int = 0
    """Transformer layers, whose kernels the host starts."""
    kernels: int = 0
    """Memory-bound kernels of forward and backward."""

    def move(self, kind: str, forward: float, backward: float, kernels: int = 2) -> None:
        """Adds bytes that an operation must move, in so many kernels."""
        self.forward_bytes[kind] += round(forward)
        self.backward_bytes[kind] += round(backward)
        self.kernels += kernels

    def add(self, other: "Work", times: int = 1) -> None:
        """Adds the work of `times` modules."""
        for mine, theirs in (
            (self.products, other.products),
            (self.attention, other.attention),
            (self.selections, other.selections),
            (self.forward_bytes, other.forward_bytes),
            (self.backward_bytes, other.backward_bytes),
            (self.states, other.states),
        ):
            for key, count in theirs.items():
                mine[key] += times * count  # type: ignore[index]
        self.layers += times * other.layers
        self.kernels += times * other.kernels

    def freeze(self) -> None:
        """Leaves out the gradients of all weights."""
        frozen: Counter[Product] = Counter()
        for product, count in self.products.items():
            frozen[dataclasses.replace(product, backward=(product.backward[0], False))] += count
        self.products = frozen

    def weights(self, experts: bool, trained: bool = False) -> int:
        """Returns the elements of the weights of products: of dense layers, or of the experts of this rank. `trained`:
        only of those whose gradients are computed."""
        return sum(
            count * product.inputs * product.outputs * (product.weights if experts else 1)
            for product, count in self.products.items()
            if product.experts == experts and (product.backward[1] or not trained)
        )
