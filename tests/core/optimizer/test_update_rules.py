"""One update of flat segments against the formulas, number by number; whole optimizers are in test_flat_optimizer."""

import math

import pytest
import torch
from torch import Tensor

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.segments import FlatSegments, StepInputs, with_main_gradients
from megatron.core.optimizer.update_rules import Adam, Lion, Sgd, UpdateRule, build_update_rule

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


def segments_of(rule: UpdateRule, dtype: torch.dtype) -> FlatSegments:
    moments = {name: [t.abs() for t in numbers(10 + i, dtype)] for i, name in enumerate(rule.moments)}
    model_weights = [torch.zeros(5, dtype=torch.bfloat16), None]
    return FlatSegments(numbers(1, dtype), [t * DIVISOR for t in numbers(2, dtype)], moments, model_weights)


def update(rule: UpdateRule, segments: FlatSegments, decay: float | Tensor, skip: bool = False) -> None:
    step = StepInputs(torch.tensor(float(COUNT)), torch.tensor(DIVISOR, dtype=torch.float64), torch.tensor(skip))
    rule.update(segments, step, torch.tensor(LR, dtype=torch.float64), decay)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sgd_without_momentum(dtype: torch.dtype) -> None:
    segments = segments_of(Sgd(0.0), dtype)
    before = [weight.clone() for weight in segments.weights]
    update(Sgd(0.0), segments, DECAY)
    for weight, w, g in zip(segments.weights, before, numbers(2, dtype), strict=True):
        torch.testing.assert_close(weight, w - LR * (g + DECAY * w))


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
    for i, weights in enumerate(before.weights):
        columns = [weights, before.gradients[i] / DIVISOR, *(before.moments[kind][i] for kind in rule.moments)]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        wanted = torch.tensor([expected(name, w, g, tuple(state)) for w, g, *state in rows], dtype=dtype).t()
        got = torch.stack([segments.weights[i], *(segments.moments[kind][i] for kind in rule.moments)])
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    model = segments.model_weights[0]
    assert model is not None and torch.equal(model, segments.weights[0].bfloat16())


@pytest.mark.parametrize("decay", [DECAY, torch.tensor(DECAY, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", RULES)
def test_a_skipped_step_changes_no_bit_even_if_gradients_are_nan(
    name: str, dtype: torch.dtype, decay: float | Tensor
) -> None:
    rule, segments = RULES[name], segments_of(RULES[name], dtype)
    segments.gradients[0].fill_(float("nan"))
    before = segments_of(rule, dtype)
    update(rule, segments, decay, skip=True)
    for kind in rule.moments:
        assert all(map(torch.equal, segments.moments[kind], before.moments[kind]))
    assert all(map(torch.equal, segments.weights, before.weights))


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


def test_narrow_gradients_are_widened_segment_by_segment() -> None:
    """--main-grads-dtype bf16: the update is that of the same numbers in float32."""
    rule, segments, wide = RULES["adamw"], *(segments_of(RULES["adamw"], torch.float32) for _ in range(2))
    narrow = FlatSegments(
        segments.weights, [g.bfloat16() for g in segments.gradients], segments.moments, segments.model_weights
    )
    wide.gradients[:] = [g.float() for g in narrow.gradients]
    assert list(with_main_gradients(wide)) == [wide]
    parts = list(with_main_gradients(narrow))
    assert [len(part.weights) for part in parts] == [1, 1]
    for part in parts:
        update(rule, part, DECAY)
    update(rule, wide, DECAY)
    assert all(map(torch.equal, segments.weights, wide.weights))
    assert all(map(torch.equal, segments.moments["exp_avg_sq"], wide.moments["exp_avg_sq"]))
