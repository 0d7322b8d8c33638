"""Update rules: Adam, AdamW, SGD and Lion over flat segments. All decisions are made on the device.

In float32 torch's fused kernels update a list of segments in one launch; on a GPU, Adam uses our own kernel
(`adam_triton`), one launch for each segment. In float64, the parity mode, the formulas are computed with plain
operations, because the fused kernels read learning rate and divisor in float32. If `skip` is set, weights and moments
do not change in any bit.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.segments import (
    FlatSegments,
    StepInputs,
    StoredSegments,
    plain_segments,
    replace,
    round_into_model,
)
from megatron.core.optimizer.state_storage import WithRemainder, split_float32, store
from megatron.core.utils.torch_private import foreach_mul_, fused_adam_, fused_adamw_, fused_sgd_


class UpdateRule(Protocol):
    """The formula of an optimizer."""

    moments: tuple[str, ...]
    """Names in checkpoints of the state tensors that every weight has. They start as zeros."""

    def update(self, segments: FlatSegments, step: StepInputs, lr: Tensor, weight_decay: float | Tensor) -> None:
        """Updates weights and moments in place and rounds the weights into the model's. `lr` is a float64 scalar tensor
        on the device, and so is a weight decay that changes over the run. Gradients are not needed afterwards and may
        be overwritten."""


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

    def update(self, segments: FlatSegments, step: StepInputs, lr: Tensor, weight_decay: float | Tensor) -> None:
        """Updates with our Triton kernel on a GPU, with torch's fused kernel elsewhere, and by the plain formula in
        float64."""
        if segments.dtype is torch.float64:
            self._update_plainly(segments, step, lr, weight_decay)
            return
        kernel = _adam_kernel() if step.skip.is_cuda else None
        if kernel is not None:
            numbers = {"betas": (self.beta1, self.beta2), "eps": self.eps, "decoupled": self.decoupled}
            for weight, gradient, (exp_avg, exp_avg_sq), model_weight in plain_segments(segments, self.moments):
                kernel(weight, gradient, exp_avg, exp_avg_sq, model_weight, step, lr, weight_decay, **numbers)
            return
        if isinstance(weight_decay, Tensor):  # the fused kernels take a number only
            apply_decay(segments, step, lr, weight_decay, self.decoupled)
            weight_decay = 0.0
        fused = fused_adamw_ if self.decoupled else fused_adam_
        fused(
            segments.weights,
            segments.gradients,
            segments.moments["exp_avg"],
            segments.moments["exp_avg_sq"],
            [],
            [step.count] * len(segments.weights),
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
        round_into_model(segments)

    def _update_plainly(self, segments: FlatSegments, step: StepInputs, lr: Tensor, decay: float | Tensor) -> None:
        correction1 = 1.0 - self.beta1 ** step.count.double()
        correction2 = 1.0 - self.beta2 ** step.count.double()
        for weight, gradient, (exp_avg, exp_avg_sq), _ in plain_segments(segments, self.moments):
            g = gradient / step.divisor
            if not self.decoupled:
                g = g + decay * weight
            m = self.beta1 * exp_avg + (1.0 - self.beta1) * g
            v = self.beta2 * exp_avg_sq + (1.0 - self.beta2) * g * g
            kept = weight * (1.0 - lr * decay) if self.decoupled else weight
            w = kept - lr * (m / correction1) / ((v / correction2).sqrt() + self.eps)
            replace(step.skip, (weight, w), (exp_avg, m), (exp_avg_sq, v))
        round_into_model(segments)


class Sgd:
    """Stochastic gradient descent with momentum; the decay is added to the gradient.

    g = gradient / divisor + weight_decay * w;  b = momentum b + g;  w = w - lr b
    """

    moments: tuple[str, ...] = ("momentum_buffer",)

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum

    def update(self, segments: FlatSegments, step: StepInputs, lr: Tensor, weight_decay: float | Tensor) -> None:
        """Updates with torch's fused kernel, and by the plain formula in float64 and without momentum."""
        if segments.dtype is torch.float64 or not self.momentum:  # the fused kernel takes no buffers with momentum 0
            self._update_plainly(segments, step, lr, weight_decay)
            return
        if isinstance(weight_decay, Tensor):
            apply_decay(segments, step, lr, weight_decay, decoupled=False)
            weight_decay = 0.0
        fused_sgd_(
            segments.weights,
            segments.gradients,
            segments.moments["momentum_buffer"] if self.momentum else [],  # the kernel refuses unused ones
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
        round_into_model(segments)

    def _update_plainly(self, segments: FlatSegments, step: StepInputs, lr: Tensor, decay: float | Tensor) -> None:
        for weight, gradient, (buffer,), _ in plain_segments(segments, self.moments):
            b = self.momentum * buffer + gradient / step.divisor + decay * weight
            replace(step.skip, (weight, weight - lr * b), (buffer, b))
        round_into_model(segments)


class Lion:
    """Lion (Chen et al. 2023, arXiv:2302.06675), with decoupled weight decay or not, like `Adam`.

    g = gradient / divisor (+ weight_decay * w, not decoupled)
    w = w (1 - lr weight_decay) (decoupled) - lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g
    """

    moments: tuple[str, ...] = ("exp_avg",)

    def __init__(self, beta1: float, beta2: float, decoupled: bool) -> None:
        self.beta1, self.beta2, self.decoupled = beta1, beta2, decoupled

    def update(self, segments: FlatSegments, step: StepInputs, lr: Tensor, weight_decay: float | Tensor) -> None:
        """Updates by the plain formula, in the type of the weights."""
        main = segments.dtype
        rate = lr.to(main)
        for weight, gradient, (exp_avg,), _ in plain_segments(segments, self.moments):
            g = gradient.to(main) / step.divisor.to(main)
            if not self.decoupled:
                g = g + weight_decay * weight
            direction = (self.beta1 * exp_avg + (1.0 - self.beta1) * g).sign()
            kept = weight * (1.0 - lr * weight_decay).to(main) if self.decoupled else weight
            m = self.beta2 * exp_avg + (1.0 - self.beta2) * g
            replace(step.skip, (weight, kept - rate * direction), (exp_avg, m))
        round_into_model(segments)


def update_stored(
    rule: Adam, segments: StoredSegments, step: StepInputs, lr: Tensor, weight_decay: float | Tensor
) -> None:
    """Updates segments whose state is stored in narrow types: every number is read in the main type, updated by the
    rule, and rounded when it is stored. bfloat16 model weights are rounded as in `WithRemainder`."""
    states = zip(*(segments.moments[name] for name in rule.moments), strict=True)
    kernel = _stored_adam_kernel() if step.skip.is_cuda else None
    numbers = {"betas": (rule.beta1, rule.beta2), "eps": rule.eps, "decoupled": rule.decoupled}
    for weight, gradient, moments, model_weight in zip(
        segments.weights, segments.gradients, states, segments.model_weights, strict=True
    ):
        main = moments[0].main
        if kernel is not None and main is torch.float32:
            kernel(weight, gradient, *moments, model_weight, step, lr, weight_decay, **numbers)
            continue
        wide, read = weight.decode(), [moment.decode() for moment in moments]
        named = {name: [moment] for name, moment in zip(rule.moments, read, strict=True)}
        rule.update(FlatSegments([wide], [gradient.to(main)], named, [None]), step, lr, weight_decay)
        for state, new in zip((weight, *moments), (wide, *read), strict=True):
            state.encode(new, step.skip)
        if model_weight is not None and not isinstance(weight, WithRemainder):
            is_bf16 = model_weight.dtype is torch.bfloat16
            store(model_weight, split_float32(wide)[0] if is_bf16 else wide.to(model_weight.dtype), step.skip)


def apply_decay(segments: FlatSegments, step: StepInputs, lr: Tensor, weight_decay: Tensor, decoupled: bool) -> None:
    """Applies a weight decay that is a tensor on the device. The update that follows must have a weight decay of 0."""
    if decoupled:
        kept = torch.where(step.skip, 1.0, 1.0 - lr * weight_decay)
        foreach_mul_(segments.weights, kept.to(segments.dtype))
    else:
        pull = (weight_decay * step.divisor).to(segments.dtype)  # the update divides it again
        for weight, gradient in zip(segments.weights, segments.gradients, strict=True):
            gradient.addcmul_(weight, pull)


@functools.cache
def _adam_kernel() -> Callable[..., None] | None:
    """Returns our own kernel; None where Triton cannot be imported."""
    try:
        from megatron.core.optimizer.adam_triton import adam_triton
    except ImportError:
        return None
    return adam_triton


@functools.cache
def _stored_adam_kernel() -> Callable[..., None] | None:
    """Returns our own kernel for state in narrow types; None where Triton cannot be imported."""
    try:
        from megatron.core.optimizer.stored_adam_triton import stored_adam_triton
    except ImportError:
        return None
    return stored_adam_triton


def build_update_rule(config: OptimizerConfig) -> UpdateRule:
    """Returns the rule that the config names. With Muon: the rule for the parameters that Muon does not update."""
    if config.optimizer == "sgd":
        return Sgd(config.sgd_momentum)
    if config.optimizer in ("muon", "dist_muon") and config.muon_scalar_optimizer == "lion":
        return Lion(config.lion_beta1, config.lion_beta2, config.decoupled_weight_decay)
    return Adam(config.adam_beta1, config.adam_beta2, config.adam_eps, config.decoupled_weight_decay)
