"""Measures the operations of an expert layer:   python benchmarks/measure_experts.py --tokens 16384 --experts 64

Times each operation of this library on a GPU, forward and backward, and its definition in plain torch, with uniform or
skewed routing. The last column is the share of the hardware's limit: the rate of a large matrix product, or of a device
copy. On a CPU it times only the definitions.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring import Operation, Operations, parser_of, print_comparison
from megatron.core.backends import Backend
from megatron.core.ops.activation import Activation
from megatron.core.ops.moe.grouped_linear import RowGroups


@dataclass(frozen=True)
class Sizes:
    """Sizes of an expert layer. Expert i is chosen with a probability proportional to i^-skew."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    skew: float

    @property
    def rows(self) -> int:
        """Copies of tokens that the experts compute."""
        return self.tokens * self.topk


class PlainMainGrad:
    """Accumulates weight gradients as a training run does."""

    defers_weight_grad = False

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def add_grouped_product(self, dy: Tensor, x: Tensor, accumulate: Callable[..., None]) -> None:
        """Adds dy^T x of each group to the total."""
        accumulate(self.total, dy, x)


def operations(sizes: Sizes, backend: Backend, device: torch.device, dtype: torch.dtype) -> Operations:
    """Returns the operations of one layer on one rank, with separate entries for forward and backward."""
    made = Operations(backend, device, dtype)
    popularity = torch.arange(1, sizes.experts + 1, device=device).pow(-sizes.skew).expand(sizes.tokens, -1)
    numbers = popularity.multinomial(sizes.topk)
    counts = torch.bincount(numbers.flatten(), minlength=sizes.experts)
    groups = RowGroups(counts, counts.tolist())
    copies, _ = backend.experts.number_choices(numbers, sizes.experts).copies(sizes.rows)
    hidden, rows = made.values(sizes.tokens, sizes.hidden), made.values(sizes.rows, sizes.hidden)
    weight = nn.Parameter(torch.randn(sizes.experts, 2 * sizes.ffn, sizes.hidden, device=device, dtype=dtype) * 0.02)
    weight.main_grad_accumulator = PlainMainGrad(torch.zeros(weight.shape, device=device))  # type: ignore[attr-defined]
    product = made.values(sizes.rows, 2 * sizes.ffn)
    gates = torch.rand(sizes.rows, device=device).requires_grad_()
    swiglu = Activation(F.silu, gated=True)
    flops = 2.0 * sizes.rows * sizes.hidden * 2 * sizes.ffn
    row_bytes = float(sizes.rows * sizes.hidden * hidden.element_size())
    token_bytes = float(sizes.tokens * sizes.hidden * hidden.element_size())
    inner_bytes = float(sizes.rows * sizes.ffn * hidden.element_size())
    sort = lambda: backend.experts.number_choices(numbers, sizes.experts).copies(sizes.rows)  # noqa: E731
    made.found.append(Operation("sort by expert", sort))
    moved = row_bytes + token_bytes
    made.both("permute", lambda: backend.experts.permute(hidden, copies), [hidden], moved, moved)
    made.both("unpermute", lambda: backend.experts.unpermute(rows, copies), [rows], moved, moved)
    made.both(
        "grouped linear", lambda: backend.experts.grouped_linear(rows, weight, groups), [rows, weight], 0.0, 0.0, flops
    )
    activate = lambda: backend.experts.weighted_activation(product, None, gates, swiglu)  # noqa: E731
    made.both("weighted activation", activate, [product, gates], 3.0 * inner_bytes, 5.0 * inner_bytes)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = parser_of(__doc__, tokens=16384, hidden=2048, ffn=1024, experts=64, topk=8, repeats=20)
    parser.add_argument(
        "--skew", type=float, default=0.0, help="expert i is chosen in proportion to i^-skew; 0: uniform"
    )
    args = parser.parse_args(argv)
    sizes = Sizes(args.tokens, args.hidden, args.ffn, args.experts, args.topk, args.skew)
    print_comparison(f"{sizes}, ", "of limit", 8192, partial(operations, sizes), args.repeats)
    return 0


if __name__ == "__main__":
    run_main(main)
