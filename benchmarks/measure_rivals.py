"""Measures a gated delta net beside flash-linear-attention:   python benchmarks/measure_rivals.py --batch 8

Times the gated delta rule, the convolution with SiLU and the gated norm on a GPU, forward, and forward with backward,
as CUDA graphs. Ours and theirs take turns, and the shorter of two turns counts. The error is the largest relative error
of the result and the gradients against the definition in float64, for 256 tokens. Both delta rules include decays,
strengths, and unit lengths of queries and keys. Without `pip install flash-linear-attention` it measures only ours.
"""

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring import elapsed, parser_of, replayed
from megatron.core.backends import LOCAL, Backend, triton_backend

_Tensors = tuple[Tensor, ...]


class Side(NamedTuple):
    """One implementation of an operation. `arrange` brings tensors [batch, tokens, key heads, ...] and weights into its
    layout; `run`, which is timed, returns [batch, tokens, ...]."""

    arrange: Callable[..., _Tensors]
    run: Callable[..., Tensor]


def our_sides(backend: Backend, width: int) -> dict[str, Side]:
    """Returns the operations of a backend, for heads of `width` channels."""
    of = backend.recurrence

    def swapped(*tensors: Tensor) -> _Tensors:
        return tuple(x.transpose(0, 1) if x.dim() > 2 else x for x in tensors)

    def side(operation: Callable[..., Tensor]) -> Side:
        return Side(swapped, lambda *each: operation(*each).transpose(0, 1))

    return {
        "delta rule": side(lambda *each: of.delta_rule_attention(*each, (width, width))),
        "convolution": side(lambda x, weight: of.causal_conv(x, weight, None, None, True)),
        "gated norm": side(lambda *each: of.gated_rms_norm(*each, 1e-6, False)),
    }


def their_sides(width: int) -> dict[str, Side]:
    """Returns the operations of flash-linear-attention; none if it is not installed."""
    try:
        rule: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        conv: Any = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
        norm: Any = importlib.import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
        # The package refuses backward on Hopper with Triton 3.4 to 3.7.0, which is wrong for tiles of 64 channels (its
        # issue 640). Heads of 128 channels have tiles of 128, and the errors show what comes out.
        importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True  # type: ignore[attr-defined]
    except ImportError:
        return {}
    kernels = {f"use_{part}_in_kernel": True for part in ("qk_l2norm", "gate", "beta_sigmoid")}

    def arrange_rule(mixed: Tensor, fading: Tensor, strength: Tensor, log_rate: Tensor, bias: Tensor) -> _Tensors:
        heads = mixed.unflatten(-1, (-1, width))  # [batch, tokens, key heads, 2 + value heads of each, width]
        scalars = fading.flatten(2), strength.flatten(2), log_rate.float(), bias.float()
        return heads[..., 0, :], heads[..., 1, :], heads[..., 2:, :].flatten(2, 3), *scalars

    def run_rule(*tensors: Tensor) -> Any:
        return rule(*tensors[:5], A_log=tensors[5], dt_bias=tensors[6], state_v_first=True, **kernels)[0]

    return {
        "delta rule": Side(arrange_rule, run_rule),
        "convolution": Side(lambda *each: each, lambda x, weight: conv(x, weight, activation="silu")[0]),
        "gated norm": Side(lambda *each: each, lambda x, z, weight: norm(x, z, weight, None, eps=1e-6)),
    }


def arguments(batch: int, length: int, heads: tuple[int, int, int], device: torch.device) -> dict[str, _Tensors]:
    """Returns random arguments, with rates (1 to 16) and steps (0.001 to 0.1) as when training begins."""
    groups, shared, width = heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = batch, length, groups

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    step = torch.exp(torch.rand(groups * shared) * math.log(100) - math.log(1000))
    decays = (torch.rand(groups * shared) * 15 + 1).log(), step + torch.log(-torch.expm1(-step))
    scalars = random(*rows, shared), random(*rows, shared), *(each.to(device, dtype) for each in decays)
    channels = groups * (2 + shared) * width
    return {
        "delta rule": (F.silu(random(*rows, (2 + shared) * width)), *scalars),
        "convolution": (random(batch, length, channels), 0.3 * random(channels, 4)),
        "gated norm": (random(*rows, shared, width), random(*rows, shared, width), random(width)),
    }


def error(side: Side, definition: Side, values: Sequence[Tensor]) -> float:
    """Returns the largest relative error of the result and of the gradients, for the first 256 tokens of a row."""
    found: list[_Tensors] = []
    for one, wide in (side, False), (definition, True):
        short = [each[:1, :256] if each.dim() > 2 else each for each in values]
        leaves = [(each.double() if wide else each).detach().requires_grad_() for each in short]
        output = one.run(*one.arrange(*leaves))
        torch.manual_seed(1)
        gradient = torch.randn(output.shape, device=output.device).bfloat16().to(output.dtype)
        found.append((output.detach(), *torch.autograd.grad(output, leaves, gradient)))
    return max(float((ours - exact).norm() / exact.norm()) for ours, exact in zip(*found, strict=True))


def calls_of(side: Side, values: Sequence[Tensor]) -> list[Callable[[], object]]:
    """Returns forward, and forward with backward; on a GPU as replays of CUDA graphs."""
    leaves = [each.detach().contiguous().requires_grad_() for each in side.arrange(*values)]
    gradient = torch.randn_like(side.run(*leaves))
    both = lambda: torch.autograd.grad(side.run(*leaves), leaves, gradient)  # noqa: E731
    return [replayed(call) if gradient.is_cuda else call for call in (lambda: side.run(*leaves), both)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    sizes = {"batch": 8, "length": 4096, "key-heads": 16, "value-heads": 32, "width": 128, "repeats": 50}
    args = parser_of(__doc__, **sizes).parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ours = our_sides((triton_backend() if device.type == "cuda" else None) or LOCAL, args.width)
    theirs, definitions = their_sides(args.width), our_sides(LOCAL, args.width)
    heads = args.key_heads, args.value_heads // args.key_heads, args.width
    print(f"{'':12} microseconds: ours forward, with backward, error; theirs forward, with backward, error")
    for name, values in arguments(args.batch, args.length, heads, device).items():
        sides = [each[name] for each in (ours, theirs) if each]
        calls = [calls_of(side, values) for side in sides]
        turns = [[[elapsed(call, device, args.repeats) for call in each] for each in calls] for _ in range(2)]
        shown = [name.ljust(12)]
        for side, first, second in zip(sides, *turns, strict=True):
            shown += [f"{min(pair) / args.repeats * 1e6:10.1f}" for pair in zip(first, second, strict=True)]
            shown.append(f"{error(side, definitions[name], values):8.1e}")
        print(*shown, flush=True)
    return 0


if __name__ == "__main__":
    run_main(main)
