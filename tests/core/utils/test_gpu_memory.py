import pytest
import torch
import torch.distributed as dist
from support.full_gpu import ALL, NCCL

from megatron.core.utils.gpu_memory import is_lack_of_gpu_memory


@pytest.mark.parametrize("text", ALL.values(), ids=ALL.keys())
def test_libraries_that_ask_for_memory_without_torch(text: str) -> None:
    assert is_lack_of_gpu_memory(RuntimeError(text))
    assert not is_lack_of_gpu_memory(ValueError(text))


def test_classes_of_torch() -> None:
    assert is_lack_of_gpu_memory(torch.OutOfMemoryError("no word about it"))
    assert is_lack_of_gpu_memory(dist.DistBackendError(NCCL))
    assert not is_lack_of_gpu_memory(dist.DistBackendError(NCCL.replace("2 'out of memory'", "1 'invalid argument'")))


def test_other_errors_are_none() -> None:
    for text in ("CUDA error: an illegal memory access was encountered", "[enforce fail] not enough memory: you tried"):
        assert not is_lack_of_gpu_memory(RuntimeError(text))
