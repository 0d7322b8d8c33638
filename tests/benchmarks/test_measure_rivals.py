"""benchmarks/measure_rivals.py runs anywhere, and compares ours and the other package on the same problem."""

import sys
from types import ModuleType

import pytest
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure_rivals import main
from megatron.core.ops.delta_rule.recurrent import gated_delta_rule_recurrent

SIZES = ["--batch", "2", "--length", "80", "--key-heads", "2", "--value-heads", "4", "--width", "16", "--repeats", "1"]
NAMES = ["delta rule", "convolution", "gated norm"]


def table(capsys: pytest.CaptureFixture[str]) -> dict[str, list[float]]:
    """Runs the tool and returns the numbers of each operation."""
    main(SIZES)
    lines = capsys.readouterr().out.splitlines()[1:]
    return {line[:12].strip(): [float(word) for word in line[12:].split()] for line in lines}


def test_ours_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [each for each in sys.modules if each == "fla" or each.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fla", None)
    found = table(capsys)
    assert list(found) == NAMES
    for forward, both, error in found.values():
        assert forward > 0 and both > 0
        assert 0 < error < 1e-5


def rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **named: object) -> tuple[Tensor, None]:
    """The package's gated delta rule, [batch, tokens, heads, channels], with everything inside."""
    rate, bias = named["A_log"], named["dt_bias"]
    assert isinstance(rate, Tensor) and isinstance(bias, Tensor)
    assert named["use_qk_l2norm_in_kernel"] and named["use_gate_in_kernel"] and named["use_beta_sigmoid_in_kernel"]
    q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
    rows = (x.transpose(0, 1) for x in (q, k, v, -rate.exp() * F.softplus(a + bias), b.sigmoid()))
    return gated_delta_rule_recurrent(*rows)[0].transpose(0, 1), None


def conv(x: Tensor, weight: Tensor, activation: str) -> tuple[Tensor, None]:
    padded = F.pad(x.transpose(1, 2), (3, 0))
    assert activation == "silu"
    return F.silu(F.conv1d(padded, weight[:, None], groups=len(weight))).transpose(1, 2), None


def norm(x: Tensor, gate: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps) * F.silu(gate)


def test_beside_the_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A stand-in for the package, which is right, has the definition's results; a wrong one is seen in its error."""
    functions: dict[str, object] = {
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule": rule,
        "fla.modules.causal_conv1d.causal_conv1d": conv,
        "fla.modules.norm.fused_norm_gate.rms_norm_gated": norm,
        "fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1": False,
    }
    for path, function in functions.items():
        module, attribute = path.rsplit(".", 1)
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        setattr(sys.modules[module], attribute, function)
    assert all(len(each) == 6 and each[2] < 1e-5 and each[5] < 1e-5 for each in table(capsys).values())
    wrong = lambda x, weight, activation: conv(x, weight.flip(1), activation)  # noqa: E731
    monkeypatch.setattr(sys.modules["fla.modules.causal_conv1d"], "causal_conv1d", wrong)
    found = table(capsys)
    assert found["convolution"][5] > 0.1 > found["convolution"][2]
