"""The reference: one process, a bare model, a plain loop with torch's own gradients, clipping and AdamW.

It shares only the model's forward with the product. tests/core/models/gpt checks this forward in one process. Results
are kept in memory only: a file that is out of date would hide the bugs that the proof is for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from parity.evidence import Evidence, Masks, Step, TensorSlice, reports_of, watched_masks
from parity.kinds import build_model, kind_of
from parity.model_list import MODELS
from parity.models import LAYERS, OPTIMIZER, Model, transformer_config
from parity.text import GLOBAL_BATCH
from torch import Tensor, nn

from megatron.core.micro_batch import MicroBatch
from megatron.core.parameters import info_of
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.transformer_config import TransformerConfig


def reference(
    model: Model,
    per_token: bool,
    steps: int = 3,
    rows: int | None = None,
    lr: float | None = None,
    layers: int = LAYERS,
) -> Evidence:
    """Returns the records of one process. With the per-token loss, `rows` of a micro-batch do not matter."""
    return _reference(model.name, per_token, steps, rows or model.rows, lr or OPTIMIZER["lr"], layers)


@cache
def _reference(name: str, per_token: bool, steps: int, rows: int, lr: float, layers: int) -> Evidence:
    model = next(m for m in MODELS if m.name == name)
    config = _config(model, per_token, layers)
    built = build_model(model, config)
    evidence = Evidence(initial=_slices(built), masks=Masks())
    optimizer, loads = plain_optimizer(built, lr), watched_loads(built)
    for number in range(steps):
        with watched_masks([built], evidence.masks if number == 0 else Masks()):
            evidence.steps.append(_step(built, model, number, per_token, rows))
        even_out(loads, config.moe_router_bias_update_rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    evidence.weights = _slices(built)
    evidence.norm_of_ones = sum(info_of(p).box.numel for p in built.parameters() if p.requires_grad) ** 0.5
    return evidence


@dataclass
class Load:
    """Number of tokens of each expert since the last step, for one router with an expert bias."""

    router: nn.Module
    counts: Tensor


def watched_loads(built: nn.Module) -> list[Load]:
    """Counts the tokens of experts from the routings, independently of the routers' own counts."""
    found = []
    for module in built.modules():
        bias = getattr(module, "expert_bias", None)
        if bias is not None:
            found.append(Load(module, torch.zeros(len(bias), dtype=torch.int64)))
            module.route = _counting(module.route, found[-1])  # type: ignore[assignment, arg-type]
    return found


def _counting(route: Callable[..., Routing], load: Load) -> Callable[..., Routing]:
    def counted(*args: Any, **kwargs: Any) -> Routing:
        routing = route(*args, **kwargs)
        load.counts += routing.tokens_per_expert(len(load.counts))
        return routing

    return counted


@torch.no_grad()
def even_out(loads: list[Load], rate: float) -> None:
    """Moves the bias of each expert by `rate`: up if it had fewer tokens than the mean, down if more."""
    for load in loads:
        # The bias is float32, so this is computed in float32 too.
        direction = (load.counts.double().mean() - load.counts).sign().float()
        load.router.expert_bias.add_(direction, alpha=rate)  # type: ignore[operator, union-attr]
        load.counts.zero_()


def _config(model: Model, per_token: bool, layers: int) -> TransformerConfig:
    # The reference runs on the CPU even if there are GPUs.
    return transformer_config(model, layers, calculate_per_token_loss=per_token, use_cpu_initialization=True)


def plain_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Returns AdamW for a bare model. Only matrices have weight decay."""
    beta2, eps, weight_decay = (OPTIMIZER[name] for name in ("adam_beta2", "adam_eps", "weight_decay"))
    named = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named if info_of(p).decays], "weight_decay": weight_decay},
        {"params": [p for p in named if not info_of(p).decays], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), eps=eps)


def _step(built: nn.Module, model: Model, number: int, per_token: bool, rows: int) -> Step:
    kind = kind_of(model)
    firsts = range(0, GLOBAL_BATCH, rows)
    batches = {first: kind.micro_batch(model, number, first, (0, 1), rows) for first in firsts}
    count = torch.stack([kind.count(batch) for batch in batches.values()]).sum().clamp(min=1)
    # Auxiliary losses of layers are averaged like the loss: over tokens, or over micro-batches.
    step = MicroBatch(auxiliary_scale=1 / count if per_token else torch.tensor(1 / len(batches), dtype=torch.float64))
    results = {
        first: kind.loss(kind.forward(built, batch, micro_batch=step), batch) for first, batch in batches.items()
    }
    if per_token:
        total = sum(loss for loss, _, _ in results.values()) / count
    else:
        total = sum(map(_mean_loss, results.values())) / len(results)
    total.backward()
    gradients = _slices(built, gradient=True)
    reports = reports_of([built])
    norm = nn.utils.clip_grad_norm_(built.parameters(), OPTIMIZER["clip_grad"])
    losses = {first: result[-1] for first, result in results.items()}
    return Step(losses, gradients, float(norm), reports)


def _mean_loss(result: tuple[Any, ...]) -> Tensor:
    """Returns the loss of a micro-batch: the mean over its tokens, or the result of the loss function."""
    mean: Tensor = result[0] / result[1].clamp(min=1) if len(result) == 3 else result[0]
    return mean


def _slices(built: nn.Module, gradient: bool = False) -> list[TensorSlice]:
    return list(_each(built, gradient))


def _each(built: nn.Module, gradient: bool) -> Iterator[TensorSlice]:
    for parameter in built.parameters():
        if gradient and not parameter.requires_grad:
            continue
        info = info_of(parameter)
        values = parameter.grad if gradient else parameter.detach()
        assert values is not None
        yield TensorSlice(
            info.name, info.global_shape, info.box, 0, info.box.numel, values.view(-1)[: info.box.numel].clone()
        )
