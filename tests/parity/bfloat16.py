"""The parity test in bfloat16: over twenty steps the losses of ranks stay within `TOLERANCE` of those of one process.

This holds only if the loss depends continuously on rounding. A router compares scores, so rounding can send a token to
another expert. `moe-capacity` in one process differs by 0.056 from itself in these steps if each product is rounded as
the sum of two halves, as tensor parallel ranks round it, and by 0.032 from float32; `moe-aux` differs by 0.014 and
0.031. In layouts that round differently, experts are therefore chosen by noise that is the same in every layout
(`moe_router_force_load_balancing`). Dropped tokens are then bit-equal, and all communicated values are still rounded.
The tests in float32 and float64 cover the real choices.
"""

import dataclasses

import torch
from parity.cells import Cell, cell_of
from parity.layouts import layout
from parity.model_list import MODELS
from parity.models import Model
from parity.program import Precision

TOLERANCE = 0.01
STEPS = 20
BFLOAT16 = Precision({"bf16": True}, {"lr": 1e-3, "bf16": True, "params_dtype": torch.bfloat16})


def forced(name: str) -> Model:
    """Returns the model with experts chosen by noise, which does not depend on rounding."""
    model = next(model for model in MODELS if model.name == name)
    settings = {**model.settings, "moe_router_force_load_balancing": True}
    return dataclasses.replace(model, name=f"{name}-forced", settings=settings)


OF_FORCED_CHOICES = [
    Cell(forced("moe-aux"), layout("sp2", "dp2", "ep2")),
    Cell(forced("moe-capacity"), layout("sp2", "pp2", "ep2-etp1")),
]
"""Layouts that round differently from one process."""

OF_NEWER_KINDS = [
    "moe-aux/dp2+ep2/per-token",
    "moe-aux/pp2-interleaved+dp2-optim_grads_params+ep2-late/per-token",
    "mla-yarn/sp2+cp2-p2p/per-token",
    "mla-packed/tp2+cp2-a2a/per-token",
    "mtp-packed/sp2+pp2/per-token",
    "mtp-learned/cp2-p2p/per-token",
]
"""Experts, latent attention and multi-token prediction. Expert parallelism alone does not change rounding."""

NEWER_CELLS = [*map(cell_of, OF_NEWER_KINDS), *OF_FORCED_CHOICES]


def largest_difference(alone: list[float], split: list[float], cell: Cell) -> float:
    """Returns the largest difference between the losses of one process and of a cell, over steps with tokens."""
    assert len(alone) == len(split) == STEPS - (cell.model.masked_step is not None)
    return max(abs(a - b) for a, b in zip(alone, split, strict=True))
