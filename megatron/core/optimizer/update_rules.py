"""Update rules: Adam, AdamW, SGD and Lion over flat segments. All decisions are made on the device.

In float32 torch's fused kernels update a segment in one launch; on a GPU, Adam uses our own kernel (`adam_triton`). In
float64, the parity mode, the formulas are computed with plain operations, because the fused kernels read learning rate
and divisor in float32. If `skip` is set, weights and moments do not change in any bit.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.segments import StateSegment, StepInputs, replace
from megatron.core.optimizer.state_storage import WithRemainder, split_float32, store
from megatron.core.utils.torch_private import fused_adam_, fused_adamw_, fused_sgd_


class UpdateRule(Protocol):
    """The formula of an optimizer."""

    moments: tuple[str, ...]
    """Names in checkpoints of the state tensors that every weight has. They start as zeros."""

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[Tensor],
        step: StepInputs,
        lr: Tensor,
        weight_decay: float | Tensor,
    ) -> None:
        """Updates weights and moments, flat tensors of one type, in place. `lr` is a float64 scalar tensor on the
        device, and so is a weight decay that changes over the run. The gradient may be overwritten."""


class Adam:
    """Adam (Kingma and Ba 2015). decoupled: AdamW (Loshchilov and Hutter 2019); otherwise the decay is added to the
    gradient.

    g = gradient / divisor (+ weight_decay * w, not decoupled);  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    w = w (1 - lr weight_decay) (decoupled) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, beta1: float, beta2: float, eps: float, decoupled: bool) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.decoupled = decoupled

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[Tensor],
        step: StepInputs,
        lr: Tensor,
        weight_decay: float | Tensor,
    ) -> None:
        """Updates with torch's fused kernel, and by the plain formula in float64."""
        exp_avg, exp_avg_sq = moments
        if weight.dtype is torch.float64:
            correction1 = 1.0 - self.beta1 ** step.count.double()
            correction2 = 1.0 - self.beta2 ** step.count.double()
            g = gradient / step.divisor
            if not self.decoupled:
                g = g + weight_decay * weight
            m = self.beta1 * exp_avg + (1.0 - self.beta1) * g
            v = self.beta2 * exp_avg_sq + (1.0 - self.beta2) * g * g
            kept = weight * (1.0 - lr * weight_decay) if self.decoupled else weight
            w = kept - lr * (m / correction1) / ((v / correction2).sqrt() + self.eps)
            replace(step.skip, (weight, w), (exp_avg, m), (exp_avg_sq, v))
            return
        if isinstance(weight_decay, Tensor):  # the fused kernels take a number only
            apply_decay(weight, gradient, step, lr, weight_decay, self.decoupled)
            weight_decay = 0.0
        fused = fused_adamw_ if self.decoupled else fused_adam_
        fused(
            [weight],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step.count],
            lr=lr.float(),
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=step.divisor.float(),
            found_inf=step.skip.float(),
        )


class Sgd:
    """Stochastic gradient descent with momentum; the decay is added to the gradient.

    g = gradient / divisor + weight_decay * w;  b = momentum b + g;  w = w - lr b
    """

    moments: tuple[str, ...] = ("momentum_buffer",)

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[Tensor],
        step: StepInputs,
        lr: Tensor,
        weight_decay: float | Tensor,
    ) -> None:
        """Updates with torch's fused kernel, and by the plain formula in float64 and without momentum."""
        (buffer,) = moments
        if weight.dtype is torch.float64 or not self.momentum:  # the fused kernel takes no buffers with momentum 0
            b = self.momentum * buffer + gradient / step.divisor + weight_decay * weight
            replace(step.skip, (weight, weight - lr * b), (buffer, b))
            return
        if isinstance(weight_decay, Tensor):
            apply_decay(weight, gradient, step, lr, weight_decay, decoupled=False)
            weight_decay = 0.0
        fused_sgd_(
            [weight],
            [gradient],
            [buffer],
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr.float(),
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # buffers start as zeros, which gives the same first step
            grad_scale=step.divisor.float(),
            found_inf=step.skip.float(),
        )


class Lion:
    """Lion (Chen et al. 2023, arXiv:2302.06675), with decoupled weight decay or not, like `Adam`.

    g = gradient / divisor (+ weight_decay * w, not decoupled)
    w = w (1 - lr weight_decay) (decoupled) - lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g
    """

    moments: tuple[str, ...] = ("exp_avg",)

    def __init__(self, beta1: float, beta2: float, decoupled: bool) -> None:
        self.beta1, self.beta2, self.decoupled = beta1, beta2, decoupled

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[Tensor],
        step: StepInputs,
        lr: Tensor,
        weight_decay: float | Tensor,
    ) -> None:
        """Updates by the plain formula, in the type of the weights."""
        (exp_avg,), main = moments, weight.dtype
        g = gradient / step.divisor.to(main)
        if not self.decoupled:
            g = g + weight_decay * weight
        direction = (self.beta1 * exp_avg + (1.0 - self.beta1) * g).sign()
        kept = weight * (1.0 - lr * weight_decay).to(main) if self.decoupled else weight
        m = self.beta2 * exp_avg + (1.0 - self.beta2) * g
        replace(step.skip, (weight, kept - lr.to(main) * direction), (exp_avg, m))


def update_segment(
    rule: UpdateRule,
    segment: StateSegment,
    step: StepInputs,
    lr: Tensor,
    weight_decay: float | Tensor,
    rounds_away: bool = False,
) -> None:
    """Updates a segment: every number is read in the main type, updated by the rule, rounded when it is stored, and the
    weights are rounded into the model's. `rounds_away`: bfloat16 weights are rounded as in `WithRemainder`."""
    main = segment.weights.main
    if isinstance(rule, Adam) and main is torch.float32 and step.skip.is_cuda:
        kernel = _adam_kernel()
        if kernel is not None:
            kernel(rule, segment, step, lr, weight_decay, rounds_away)
            return
    states = segment.weights, *(segment.moments[name] for name in rule.moments)
    wide, *moments = read = [state.decode() for state in states]
    rule.update(wide, segment.gradient.to(main), moments, step, lr, weight_decay)
    for state, new in zip(states, read, strict=True):
        state.encode(new, step.skip)
    model_weights = segment.model_weights
    if model_weights is not None and not isinstance(segment.weights, WithRemainder):
        rounded = split_float32(wide)[0] if rounds_away and model_weights.dtype is torch.bfloat16 else wide
        store(model_weights, rounded.to(model_weights.dtype), step.skip)


def apply_decay(
    weight: Tensor, gradient: Tensor, step: StepInputs, lr: Tensor, weight_decay: Tensor, decoupled: bool
) -> None:
    """Applies a weight decay that is a tensor on the device. The update that follows must have a weight decay of 0."""
    if decoupled:
        weight.mul_(torch.where(step.skip, 1.0, 1.0 - lr * weight_decay).to(weight.dtype))
    else:
        gradient.addcmul_(weight, (weight_decay * step.divisor).to(weight.dtype))  # the update divides it again


@functools.cache
def _adam_kernel() -> Callable[..., None] | None:
    """Returns our own kernel; None where Triton cannot be imported."""
    try:
        from megatron.core.optimizer.adam_triton import adam_triton
    except ImportError:
        return None
    return adam_triton


def build_update_rule(config: OptimizerConfig) -> UpdateRule:
    """Returns the rule that the config names. With Muon: the rule for the parameters that Muon does not update."""
    if config.optimizer == "sgd":
        return Sgd(config.sgd_momentum)
    if config.optimizer in ("muon", "dist_muon") and config.muon_scalar_optimizer == "lion":
        return Lion(config.lion_beta1, config.lion_beta2, config.decoupled_weight_decay)
    return Adam(config.adam_beta1, config.adam_beta2, config.adam_eps, config.decoupled_weight_decay)
