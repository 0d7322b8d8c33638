"""Measures the memory-bound operations of a training step:   python benchmarks/measure_kernels.py --tokens 32768

Times norms, rotary positions, activations, bias and residual, cross entropy and the update of the weights on a GPU,
forward and backward separately, and their definitions in plain torch. Prints the speed of each relative to a device
copy: an operation with 100% moves its inputs and outputs as fast as a copy. On a CPU it times only the definitions.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch
import torch.nn.functional as F

from benchmarks.measuring import Operation, Operations, parser_of, print_comparison
from megatron.core.backends import Backend
from megatron.core.ops.activation import Activation, gelu_tanh
from megatron.core.ops.rope import Rotation
from megatron.core.optimizer.segments import StateSegment, StepInputs
from megatron.core.optimizer.state_storage import Plain
from megatron.core.optimizer.update_rules import Adam, update_segment
from megatron.core.utils.torch_private import foreach_norm


class Kernels(Operations):
    """Memory-bound operations of a training step."""

    def __init__(self, args: argparse.Namespace, backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(backend, device, dtype)
        self.args = args
        self.norms()
        self.positions()
        self.activations()
        self.losses()
        self.updates()

    def norms(self) -> None:
        """Adds norms, and bias with residual."""
        args, backend = self.args, self.backend
        x, w, b = self.values(args.tokens, args.hidden), self.values(args.hidden), self.values(args.hidden)
        size = float(x.numel() * x.element_size())
        self.both("rms norm", lambda: backend.norms.rms_norm(x, w, 1e-5), [x, w], 2 * size, 3 * size)
        self.both("layer norm", lambda: backend.norms.layer_norm(x, w, b, 1e-5), [x, w, b], 2 * size, 3 * size)
        heads = self.values(args.tokens, args.hidden // args.channels, args.channels)
        v = self.values(args.channels)
        self.both("norm of heads", lambda: backend.norms.rms_norm(heads, v, 1e-5), [heads, v], 2 * size, 3 * size)
        residual = self.values(args.tokens, args.hidden)
        add = lambda: backend.dropout.bias_dropout_add(x, b, residual, 0.0, None)  # noqa: E731
        self.both("bias and residual", add, [x, b, residual], 3 * size, size)

    def positions(self) -> None:
        """Adds rotary positions."""
        args = self.args
        heads = args.hidden // args.channels
        per_group = max(1, heads // 4)
        packed = self.values(args.tokens, 1, heads // per_group, per_group + 2, args.channels)
        angle = torch.rand(args.tokens, 1, 1, args.channels // 2, device=self.device) * 6
        rotation = Rotation(angle.cos(), angle.sin())
        query = packed[..., :per_group, :].detach().requires_grad_()
        size = float(query.numel() * query.element_size())
        call = lambda: self.backend.attention.apply_rope(query, rotation)  # noqa: E731
        self.both("rotary positions", call, [query], 2 * size, 2 * size)

    def activations(self) -> None:
        """Adds activations of an MLP."""
        args, backend = self.args, self.backend
        product, bias = self.values(args.tokens, args.ffn), self.values(args.ffn)
        size = float(product.numel() * product.element_size())
        gelu = lambda: backend.experts.weighted_activation(product, bias, None, Activation(gelu_tanh))  # noqa: E731
        self.both("gelu with bias", gelu, [product, bias], 2 * size, 3 * size)
        swiglu = lambda: backend.experts.weighted_activation(product, None, None, Activation(F.silu, True))  # noqa: E731
        self.both("swiglu", swiglu, [product], 1.5 * size, 2.5 * size)

    def losses(self) -> None:
        """Adds losses."""
        args = self.args
        logits = self.values(args.tokens // 4, args.vocab)
        labels = torch.randint(args.vocab, (args.tokens // 4,), device=self.device)
        size = float(logits.numel() * logits.element_size())
        self.both("cross entropy", lambda: self.backend.losses.cross_entropy(logits, labels), [logits], size, 2 * size)

    def updates(self) -> None:
        """Adds AdamW of float32 weights with bfloat16 copies, in segments of the size of a layer."""
        count = max(1, self.args.weights // 4)
        rule, scalar = Adam(0.9, 0.95, 1e-8, decoupled=True), partial(torch.tensor, device=self.device)
        segments = []
        for _ in range(4):
            weight, gradient, *moments = (torch.rand(count, device=self.device) for _ in range(4))
            stored = {name: Plain(moment, torch.float32) for name, moment in zip(rule.moments, moments, strict=True)}
            segments.append(StateSegment(Plain(weight, torch.float32), gradient, stored, weight.bfloat16(), True))
        step = StepInputs(scalar(3.0), scalar(1.0, dtype=torch.float64), scalar(False))
        lr = scalar(1e-3, dtype=torch.float64)

        def adamw() -> None:
            for segment in segments:
                update_segment(rule, segment, step, lr, 0.1)

        self.found += [
            Operation("AdamW", adamw, nbytes=30.0 * count * 4),
            Operation(
                "norm of gradients", lambda: foreach_norm([each.gradient for each in segments]), nbytes=4.0 * count * 4
            ),
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    sizes = {"tokens": 32768, "hidden": 2048, "ffn": 8192, "channels": 64, "vocab": 32000, "weights": 2**28}
    args = parser_of(__doc__, **sizes, repeats=20).parse_args(argv)
    print_comparison("", "of a copy", 16384, partial(Kernels, args), args.repeats)
    return 0


if __name__ == "__main__":
    run_main(main)
