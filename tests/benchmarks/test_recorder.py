"""benchmarks/recorder.py counts the products and bytes of the first micro-batch."""

import torch

from benchmarks.recorder import Recorder, Roofline
from megatron.core.backends import LOCAL
from megatron.diagnosis.planning.work import Product


def test_bytes_of_memory_bound_operations() -> None:
    recorder = Recorder()
    backend = recorder.recording(LOCAL)
    x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(8)

    def forward_step(data: None, model: None) -> None:
        backend.norms.rms_norm(x, weight, 1e-5)
        backend.norms.rms_norm(x.detach(), weight, 1e-5)  # has no backward
        backend.dropout.bias_dropout_add(x, None, x, 0.0, None)
        backend.matrices.linear(x.detach(), torch.ones(16, 8, requires_grad=True))

    backend.norms.rms_norm(x, weight, 1e-5)  # before the micro-batch
    for _ in range(2):  # only the first counts
        recorder.around(forward_step)(None, None)  # type: ignore[arg-type]
    size = 4 * 8 * 4
    # The norm reads x and writes y; backward reads x and dy and writes dx. The sum reads two and writes one; backward
    # reads the residual's gradient where it joins the norm's.
    assert recorder.moved == {"norms": (5 + 2) * size, "residuals": 4 * size}
    assert recorder.products == {Product(4, 8, 16, torch.float32, backward=(False, True)): 1}
    assert recorder.flops() == 3 * 2 * 4 * 8 * 16


def test_scans_of_state_space_layers() -> None:
    """Mamba-2 multiplies with a head's state twice for each token, the gated delta rule three times; backward needs
    twice as much. Forward reads the inputs and writes the output, and backward reads the inputs and the output's
    gradient and writes the gradients of the inputs."""
    recorder = Recorder()
    ops = recorder.recording(LOCAL).recurrence

    def forward_step(data: None, model: None) -> None:
        one = torch.ones(2)
        # 6 tokens of 2 groups with a head of 4 channels each, and states of 4 x 3 numbers
        ops.mamba_scan(torch.ones(6, 1, 2, 4 + 2 * 3), torch.ones(6, 1, 2, 1), one, one, one, head_dim=4, state_dim=3)
        # 6 tokens of a key head with 2 value heads of 4 channels, and states of 3 x 4 numbers
        fading = torch.ones(6, 1, 1, 2)
        ops.delta_rule_attention(torch.ones(6, 1, 1, 2 * 3 + 2 * 4), fading, fading, one, one, (3, 4), None)
        gate = torch.ones(6, 1, 2, 4)
        ops.gated_rms_norm(torch.ones(6, 1, 2, 4), gate, torch.ones(4), 1e-5, True)

    recorder.around(forward_step)(None, None)  # type: ignore[arg-type]
    states = 6 * 2 * 4 * 3
    mamba, delta = 3 * (6 * 20 + 6 * 2) + 2 * (6 * 8), 3 * (6 * 14 + 2 * 6 * 2) + 2 * (6 * 8)
    names = [f"scan of {kind}: {states} numbers of states" for kind in ("mamba", "gated_delta_net")]
    assert recorder.others == {
        Roofline("state space", names[0], 3 * 2 * 2 * states, 4 * mamba): 1,
        Roofline("state space", names[1], 3 * 2 * 3 * states, 4 * delta): 1,
    }
    assert recorder.moved == {"gates and norms": 8 * 6 * 8 * 4}
    assert recorder.flops() == 3 * 2 * (2 + 3) * states
