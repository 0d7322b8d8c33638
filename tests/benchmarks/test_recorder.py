"""benchmarks/recorder.py counts the products and bytes of the first micro-batch."""

import torch

from benchmarks.recorder import Recorder
from megatron.core.backends import LOCAL
from megatron.diagnosis.planning.work import Product


def test_bytes_of_memory_bound_operations() -> None:
    recorder = Recorder()
    backend = recorder.recording(LOCAL)
    x, weight = torch.ones(4, 8), torch.ones(8)

    def forward_step(data: None, model: None) -> None:
        backend.norms.rms_norm(x, weight, 1e-5)
        backend.dropout.bias_dropout_add(x, None, x, 0.0, None)
        backend.matrices.linear(x, torch.ones(16, 8, requires_grad=True))

    backend.norms.rms_norm(x, weight, 1e-5)  # before the micro-batch
    for _ in range(2):  # only the first counts
        recorder.around(forward_step)(None, None)  # type: ignore[arg-type]
    size = 4 * 8 * 4
    # The norm reads x and writes y; backward reads x and dy and writes dx. The sum reads two and writes one; backward
    # reads the residual's gradient where it joins the norm's.
    assert recorder.moved == {"norms": 5 * size, "residuals": 4 * size}
    assert recorder.products == {Product(4, 8, 16, torch.float32, backward=(False, True)): 1}
    assert recorder.flops() == 3 * 2 * 4 * 8 * 16
