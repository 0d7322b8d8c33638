"""One update of flat segments against the formulas, number by number; whole optimizers are in test_flat_optimizer."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.segments import StateSegment, StepInputs
from megatron.core.optimizer.state_storage import Plain
from megatron.core.optimizer.update_rules import Adam, Lion, Sgd, UpdateRule, build_update_rule, update_segment

LR, DECAY, DIVISOR, COUNT = 0.05, 0.1, 8.0, 3
RULES: dict[str, UpdateRule] = {
    "adamw": Adam(0.9, 0.95, 1e-8, decoupled=True),
    "adam": Adam(0.9, 0.95, 1e-8, decoupled=False),
    "sgd": Sgd(0.9),
    "sgd without momentum": Sgd(0.0),
    "lion": Lion(0.8, 0.9, decoupled=True),
    "coupled lion": Lion(0.8, 0.9, decoupled=False),
}


def numbers(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in (5, 3)]


def numbers_of(segment: StateSegment) -> list[Tensor]:
    """Weights and moments."""
    return [state.decode() for state in (segment.weights, *segment.moments.values())]


def segments_of(rule: UpdateRule, dtype: torch.dtype) -> list[StateSegment]:
    """Two segments, one with narrower weights of the model."""
    moments = [[t.abs() for t in numbers(10 + i, dtype)] for i, _ in enumerate(rule.moments)]
    model_weights = [torch.zeros(5, dtype=torch.bfloat16), None]
    made = []
    for weight, gradient, model_weight, *states in zip(
        numbers(1, dtype), numbers(2, dtype), model_weights, *moments, strict=True
    ):
        stored = {name: Plain(state, dtype) for name, state in zip(rule.moments, states, strict=True)}
        has_main = model_weight is not None
        made.append(StateSegment(Plain(weight, dtype), gradient * DIVISOR, stored, model_weight, has_main))
    return made


def update(rule: UpdateRule, segments: list[StateSegment], decay: float | Tensor, skip: bool = False) -> None:
    step = StepInputs(torch.tensor(float(COUNT)), torch.tensor(DIVISOR, dtype=torch.float64), torch.tensor(skip))
    for segment in segments:
        update_segment(rule, segment, step, torch.tensor(LR, dtype=torch.float64), decay)


def expected(name: str, w: float, g: float, state: tuple[float, ...]) -> tuple[float, ...]:
    """Weight and moments after an update of one number."""
    if name.startswith("sgd"):
        (b,) = state
        b = (0.9 if name == "sgd" else 0.0) * b + g + DECAY * w
        return w - LR * b, b
    if name in ("adam", "coupled lion"):
        g += DECAY * w
    else:
        w *= 1 - LR * DECAY
    if name.endswith("lion"):
        (m,) = state
        return w - LR * math.copysign(1.0, 0.8 * m + 0.2 * g), 0.9 * m + 0.1 * g
    m, v = 0.9 * state[0] + 0.1 * g, 0.95 * state[1] + 0.05 * g * g
    return w - LR * (m / (1 - 0.9**COUNT)) / (math.sqrt(v / (1 - 0.95**COUNT)) + 1e-8), m, v


@pytest.mark.parametrize("decay", [DECAY, torch.tensor(DECAY, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", RULES)
def test_numbers_follow_the_formulas(name: str, dtype: torch.dtype, tolerance: float, decay: float | Tensor) -> None:
    rule, segments = RULES[name], segments_of(RULES[name], dtype)
    before = segments_of(rule, dtype)
    update(rule, segments, decay)
    for segment, old in zip(segments, before, strict=True):
        weights, *moments = numbers_of(old)
        columns = [weights, old.gradient / DIVISOR, *moments]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        wanted = torch.tensor([expected(name, w, g, tuple(state)) for w, g, *state in rows], dtype=dtype).t()
        torch.testing.assert_close(torch.stack(numbers_of(segment)), wanted, rtol=tolerance, atol=tolerance)
    model = segments[0].model_weights
    assert model is not None and torch.equal(model, segments[0].weights.decode().bfloat16())


@pytest.mark.parametrize("decay", [DECAY, torch.tensor(DECAY, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", RULES)
def test_a_skipped_step_changes_no_bit_even_if_gradients_are_nan(
    name: str, dtype: torch.dtype, decay: float | Tensor
) -> None:
    rule, segments = RULES[name], segments_of(RULES[name], dtype)
    segments[0].gradient.fill_(float("nan"))
    before = segments_of(rule, dtype)
    update(rule, segments, decay, skip=True)
    for segment, old in zip(segments, before, strict=True):
        assert all(map(torch.equal, numbers_of(segment), numbers_of(old)))


def test_a_config_names_its_rule() -> None:
    adam = build_update_rule(OptimizerConfig(adam_beta1=0.8, adam_beta2=0.7, adam_eps=1e-3))
    assert isinstance(adam, Adam) and adam.decoupled and (adam.beta1, adam.beta2, adam.eps) == (0.8, 0.7, 1e-3)
    coupled = build_update_rule(OptimizerConfig(decoupled_weight_decay=False))
    assert isinstance(coupled, Adam) and not coupled.decoupled
    lion = build_update_rule(OptimizerConfig(optimizer="muon", muon_scalar_optimizer="lion", lion_beta2=0.7))
    assert isinstance(lion, Lion) and lion.decoupled and (lion.beta1, lion.beta2) == (0.95, 0.7)
    assert isinstance(build_update_rule(OptimizerConfig(muon_scalar_optimizer="lion")), Adam)  # without Muon: no effect
    sgd = build_update_rule(OptimizerConfig(optimizer="sgd", sgd_momentum=0.3))
    assert isinstance(sgd, Sgd) and sgd.momentum == 0.3


def test_narrow_gradients_are_widened() -> None:
    """--main-grads-dtype bf16: the update is that of the same numbers in float32."""
    rule, (segment, _), (wide, _) = RULES["adamw"], *(segments_of(RULES["adamw"], torch.float32) for _ in range(2))
    narrow = dataclasses.replace(segment, gradient=segment.gradient.bfloat16())
    wide.gradient.copy_(narrow.gradient)
    update(rule, [narrow, wide], DECAY)
    assert all(map(torch.equal, numbers_of(narrow), numbers_of(wide)))
