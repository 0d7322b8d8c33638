"""The oracle: one process, a bare model, a plain loop with torch's own gradients, clipping and AdamW.

It shares the model's forward with the product, and nothing around it. That a model in one process is right is shown
elsewhere (tests/core/models/gpt).
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from parity.evidence import Evidence, Masks, Piece, Step, watched_masks
from parity.models import MODELS, OPTIMIZER, Model, build_model, transformer_config
from parity.text import GLOBAL_BATCH, micro_batch
from torch import Tensor, nn

from megatron.core.parameters import info_of


def reference(
    model: Model, per_token: bool, steps: int = 3, rows: int | None = None, lr: float | None = None
) -> Evidence:
    """What one process leaves behind. Under the loss per token any number of `rows` a micro-batch gives the same."""
    return _reference(model.name, per_token, steps, rows or model.rows, lr or OPTIMIZER["lr"])


@cache
def _reference(name: str, per_token: bool, steps: int, rows: int, lr: float) -> Evidence:
    model = next(m for m in MODELS if m.name == name)
    built = build_model(model, transformer_config(model, use_cpu_initialization=True))  # also where there are GPUs
    evidence = Evidence(initial=_pieces(built), masks=Masks())
    optimizer = plain_optimizer(built, lr)
    for number in range(steps):
        with watched_masks([built], evidence.masks if number == 0 else Masks()):
            evidence.steps.append(_step(built, model, number, per_token, rows))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    evidence.weights = _pieces(built)
    evidence.norm_of_ones = sum(info_of(p).box.numel for p in built.parameters()) ** 0.5
    return evidence


def plain_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW over a bare model, with decay for matrices alone."""
    beta2, eps, weight_decay = (OPTIMIZER[name] for name in ("adam_beta2", "adam_eps", "weight_decay"))
    named = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named if info_of(p).decays], "weight_decay": weight_decay},
        {"params": [p for p in named if not info_of(p).decays], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), eps=eps)


def _step(built: nn.Module, model: Model, number: int, per_token: bool, rows: int) -> Step:
    sums = {first: _sum_and_count(built, model, number, first, rows) for first in range(0, GLOBAL_BATCH, rows)}
    if per_token:
        total = sum(loss for loss, _ in sums.values()) / sum(count for _, count in sums.values()).clamp(min=1)
    else:
        total = sum(loss / count.clamp(min=1) for loss, count in sums.values()) / len(sums)
    total.backward()
    gradients = _pieces(built, gradient=True)
    norm = nn.utils.clip_grad_norm_(built.parameters(), OPTIMIZER["clip_grad"])
    losses = {first: torch.stack([loss.detach(), count]) for first, (loss, count) in sums.items()}
    return Step(losses, gradients, float(norm))


def _sum_and_count(built: nn.Module, model: Model, number: int, first: int, rows: int) -> tuple[Tensor, Tensor]:
    batch = micro_batch(model, number, first, rows=rows)
    losses = built(batch.ids, batch.tokens.positions, None, labels=batch.labels, tokens=batch.tokens)
    return (losses * batch.mask).sum(), batch.mask.sum()


def _pieces(built: nn.Module, gradient: bool = False) -> list[Piece]:
    return list(_each(built, gradient))


def _each(built: nn.Module, gradient: bool) -> Iterator[Piece]:
    for parameter in built.parameters():
        info = info_of(parameter)
        values = parameter.grad if gradient else parameter.detach()
        assert values is not None
        yield Piece(
            info.name, info.global_shape, info.box, 0, info.box.numel, values.view(-1)[: info.box.numel].clone()
        )
