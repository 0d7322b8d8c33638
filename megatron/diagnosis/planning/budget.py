"""What a model costs to train: parameters, tokens, hours and price, beside the cheapest model of the same loss."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.gpus import Gpu
from megatron.diagnosis.planning.scaling_laws import (
    CORRECTED,
    FLOPS_PER_TOKEN,
    INFERENCE_FLOPS_PER_TOKEN,
    RULE_OF_THUMB,
    ScalingLaw,
)


@dataclass(frozen=True)
class Rates:
    """What a floating point operation costs."""

    gpu: Gpu
    mfu: float
    """Model FLOPs utilisation of training: the share of the GPU's bf16 peak that reaches the model."""
    inference_mfu: float
    """Model FLOPs utilisation of inference."""
    price_per_hour: float
    """Price of a GPU-hour, in any currency."""

    def hours(self, flops: float, mfu: float) -> float:
        """Returns GPU-hours for a number of operations."""
        return flops / (self.gpu.bf16_peak.value * mfu) / 3600

    def flops(self, hours: float) -> float:
        """Returns the operations of training in a number of GPU-hours."""
        return hours * 3600 * self.gpu.bf16_peak.value * self.mfu


@dataclass(frozen=True)
class Cost:
    """A model, its training and its use."""

    parameters: float
    tokens: float
    """Tokens that it is trained on."""
    inference_tokens: float
    """Tokens that it reads and writes after training."""
    loss: float
    """Nats per token that the law predicts."""
    hours: float
    """GPU-hours of training."""
    inference_hours: float
    """GPU-hours of its use."""

    @property
    def ratio(self) -> float:
        """Tokens per parameter."""
        return self.tokens / self.parameters

    @property
    def flops(self) -> float:
        """Operations of training."""
        return FLOPS_PER_TOKEN * self.parameters * self.tokens

    @property
    def all_hours(self) -> float:
        """GPU-hours of training and use."""
        return self.hours + self.inference_hours


@dataclass(frozen=True)
class Budget:
    """The result: the model that was asked for, and the best ones."""

    asked: Cost
    best_of_compute: Cost
    """The model of the least loss with the same operations of training."""
    cheapest_to_train: Cost
    """The model that reaches the loss of `asked` with the least training."""
    cheapest_to_use: Cost | None
    """The model that reaches it with the least training and use together; None without expected use."""


def budget(
    rates: Rates,
    parameters: float | None = None,
    tokens: float | None = None,
    gpu_hours: float | None = None,
    inference_tokens: float = 0.0,
    law: ScalingLaw = CORRECTED,
) -> Budget:
    """Returns what a model costs. Give one or two of parameters, tokens and GPU-hours of training: of one, the law says
    the others. Raises UserError for none and for all three."""
    given = [value is not None for value in (parameters, tokens, gpu_hours)]
    if sum(given) not in (1, 2):
        raise UserError(
            "give one or two of --params, --tokens and --gpu-hours; the others follow, from the law or from the two"
        )
    if gpu_hours is not None:
        flops = rates.flops(gpu_hours)
        if parameters is None:
            parameters = law.optimal_parameters(flops) if tokens is None else flops / FLOPS_PER_TOKEN / tokens
        tokens = flops / FLOPS_PER_TOKEN / parameters
    elif parameters is None:
        assert tokens is not None
        parameters = law.parameters_for_tokens(tokens)
    elif tokens is None:
        tokens = law.optimal_tokens(parameters)

    def cost(one: float, of: float) -> Cost:
        used = INFERENCE_FLOPS_PER_TOKEN * one * inference_tokens
        hours = rates.hours(FLOPS_PER_TOKEN * one * of, rates.mfu), rates.hours(used, rates.inference_mfu)
        return Cost(one, of, inference_tokens, law.loss(one, of), *hours)

    asked = cost(parameters, tokens)
    best = law.optimal_parameters(asked.flops)
    use = law.cheapest(asked.loss, inference_tokens, rates.mfu / rates.inference_mfu) if inference_tokens else None
    return Budget(
        asked,
        cost(best, asked.flops / FLOPS_PER_TOKEN / best),
        cost(*law.cheapest(asked.loss)),
        None if use is None else cost(*use),
    )


def budget_lines(found: Budget, rates: Rates, law: ScalingLaw, gpus: int | None) -> Iterator[str]:
    """Yields the report: the model, the optima, and everything that was assumed. `gpus` adds days."""
    asked = found.asked
    yield f"model        {_count(asked.parameters)} parameters, {_count(asked.tokens)} tokens: {_ratio(asked)}"
    yield f"compute      {asked.flops:.3g} FLOP"
    days = f"; {asked.hours / gpus / 24:,.1f} days on {gpus:,} GPUs" if gpus else ""
    yield f"time         {asked.hours:,.0f} GPU-hours{days}"
    yield f"price        {asked.hours * rates.price_per_hour:,.0f} to train"
    if asked.inference_tokens:
        yield (
            f"use          {_count(asked.inference_tokens)} tokens: {asked.inference_hours:,.0f} GPU-hours, "
            f"{asked.inference_hours * rates.price_per_hour:,.0f}; with training "
            f"{asked.all_hours * rates.price_per_hour:,.0f}"
        )
    yield f"loss         {asked.loss:.4f} nats per token, by the law"
    yield "optimum"
    compute = found.best_of_compute
    yield f"  least loss for this training   {_model(compute)}: loss {compute.loss:.4f}"
    trained, used = found.cheapest_to_train, found.cheapest_to_use
    yield f"  this loss, least training      {_model(trained)}: {_prices(trained, rates)}"
    if used is not None:
        yield f"  this loss, least with use      {_model(used)}: {_prices(used, rates)}"
    yield "assumed"
    yield (
        f"  {FLOPS_PER_TOKEN:.0f} FLOP per parameter and token of training, {INFERENCE_FLOPS_PER_TOKEN:.0f} of use "
        "(Kaplan et al. 2020, arXiv:2001.08361), without attention's scores; a dense model: all parameters count"
    )
    peak = rates.gpu.bf16_peak
    yield f"  {rates.gpu.title}: {peak.value / 1e12:,.0f} TFLOP/s in bf16 ({peak.source}; --gpu)"
    yield f"  {rates.mfu:.0%} of it in training (--mfu), {rates.inference_mfu:.0%} in use (--inference-mfu)"
    yield f"  {rates.price_per_hour:,.2f} a GPU-hour, in your currency (--price-per-hour)"
    yield f"  loss: {law.source}"
    yield f"  rule of thumb: {RULE_OF_THUMB:.0f} tokens per parameter (approaches 1 and 2 of Hoffmann et al. 2022)"
    yield "  least with use: Sardana et al. 2023 (arXiv:2401.00448), equation 3"


def _model(cost: Cost) -> str:
    return f"{_count(cost.parameters)} parameters, {_count(cost.tokens)} tokens, {_ratio(cost)}"


def _ratio(cost: Cost) -> str:
    return f"{cost.ratio:,.0f} tokens per parameter" if cost.ratio >= 10 else f"{cost.ratio:.2g} tokens per parameter"


def _prices(cost: Cost, rates: Rates) -> str:
    trained = f"{cost.hours * rates.price_per_hour:,.0f} to train"
    return f"{trained}, {cost.all_hours * rates.price_per_hour:,.0f} with use" if cost.inference_tokens else trained


def _count(number: float) -> str:
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"
