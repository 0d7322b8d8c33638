"""The kernel for weight gradients with specialised warps. Triton's interpreter does not run it:
tests/core/ops/test_compiled_kernels.py compiles it, and tests/gpu/test_experts_on_gpu.py compares its values."""

import pytest
import torch
from torch import Tensor

from megatron.core.ops.moe.grouped_accumulate_triton import BUFFERS, HALF, IN, PIECE, takes


def test_each_tile_starts_at_the_first_buffer() -> None:
    assert IN.value % PIECE.value == 0 and IN.value // PIECE.value % BUFFERS.value == 0
    assert HALF.value * torch.bfloat16.itemsize == 128 == PIECE.value * torch.float32.itemsize


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))


def tensors(
    rows: int = 64, out: int = 128, width: int = 24, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(2, out, width), torch.zeros(rows, out, dtype=dtype), torch.zeros(rows, width, dtype=dtype)


@pytest.mark.usefixtures("hopper")
def test_takes_whole_tiles_of_outputs_and_aligned_rows_of_16_bits() -> None:
    assert takes(*tensors()) and takes(*tensors(dtype=torch.float16)) and takes(*tensors(rows=1, out=384, width=272))
    assert not takes(*tensors(rows=0))
    assert not takes(*tensors(out=192))
    assert not takes(*tensors(width=28))
    assert not takes(*tensors(dtype=torch.float32))
    total, left, right = tensors()
    assert not takes(total, left.view(-1)[4 : 4 + 32 * 128].view(32, 128), right[:32])


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_takes_nothing_on_other_gpus(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    assert not takes(*tensors())


def test_takes_no_tensors_of_the_cpu() -> None:
    assert not takes(*tensors())
