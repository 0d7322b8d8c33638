"""The proof in bfloat16: losses of twenty steps, split over ranks and not, stay within `TOLERANCE`.

Only a model whose outcome is continuous can be held to that. One that ranks numbers, to choose experts or whom to drop,
sends a token elsewhere where two of them lie closer than they are rounded: `moe-capacity` in one process differs from
itself by 0.056 within these steps if each product is rounded as the sum of two halves, as tensor parallel ranks round
it, and by 0.032 from float32; `moe-aux` by 0.014 and 0.031. So where rounding differs, experts are chosen by noise that
is the same in every layout (`moe_router_force_load_balancing`): whom they drop is then equal to the bit, and all that
travels is still rounded. What the choices themselves are in a layout, float32 and float64 show.
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
    """The model with choices that are not rounded."""
    model = next(model for model in MODELS if model.name == name)
    settings = {**model.settings, "moe_router_force_load_balancing": True}
    return dataclasses.replace(model, name=f"{name}-forced", settings=settings)


OF_FORCED_CHOICES = [
    Cell(forced("moe-aux"), layout("sp2", "dp2", "ep2")),
    Cell(forced("moe-capacity"), layout("sp2", "pp2", "ep2-etp1")),
]
"""Layouts that round differently."""

OF_NEWER_KINDS = [
    "moe-aux/dp2+ep2/per-token",
    "moe-aux/pp2-interleaved+dp2-optim_grads_params+ep2-overlap-late/per-token",
    "mla-yarn/sp2+cp2-p2p/per-token",
    "mla-packed/tp2+cp2-a2a/per-token",
    "mtp-packed/sp2+pp2/per-token",
    "mtp-learned/cp2-p2p/per-token",
]
"""Experts, latent attention and tokens predicted further on. A split of experts alone rounds nothing else."""

NEWER_CELLS = [*map(cell_of, OF_NEWER_KINDS), *OF_FORCED_CHOICES]


def largest_difference(alone: list[float], split: list[float], cell: Cell) -> float:
    """Between the losses of one process and those of a cell's ranks, of steps that have any."""
    assert len(alone) == len(split) == STEPS - (cell.model.masked_step is not None)
    return max(abs(a - b) for a, b in zip(alone, split, strict=True))
