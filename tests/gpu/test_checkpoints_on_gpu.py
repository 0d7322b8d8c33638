"""Tensors on a GPU through checkpoints: staged in pinned blocks, back to the bit, into live memory."""

import pytest
import torch
from support.small_models import SmallModel

from megatron.core.dist_checkpointing import data_file
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.writing import save
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.parameters import Box
from megatron.training.state import weights_are_finite

pytestmark = pytest.mark.gpu

EMPTY = {"common": {}, "config": {}, "layout": {}}


def chunk_of(name, values):
    return Chunk(name, tuple(values.shape), Box.whole(tuple(values.shape)), None, values)


def test_large_and_small_tensors_come_back_bit_equal(tmp_path):
    """More blocks than staging buffers, in several types, right after the kernels that make them."""
    device = torch.device("cuda")
    count = data_file.BLOCK_BYTES * 5 // 8 + 3  # two blocks and a half in float32, with a tail
    made = {
        "bf16": lambda: torch.randn(count, device=device).bfloat16(),
        "fp32": lambda: torch.randn(count, device=device).cumsum(0),
        "fp64": lambda: torch.randn(11, 7, device=device, dtype=torch.float64),
        "count": lambda: torch.full((), 3, device=device, dtype=torch.int64),
        "on host": lambda: torch.randn(1000),
    }
    chunks = [chunk_of(name, make()) for name, make in made.items()]
    save(tmp_path, chunks, step=1, **EMPTY)
    targets = [chunk_of(chunk.name, torch.zeros_like(chunk.tensor)) for chunk in chunks]
    load(tmp_path, targets)
    for chunk, target in zip(chunks, targets, strict=True):
        assert torch.equal(chunk.tensor, target.tensor), chunk.name


def test_a_part_of_a_matrix_and_another_type(tmp_path):
    """A column slice, as tensor parallelism wants it, and float32 read into bfloat16 memory."""
    whole = torch.randn(3000, 2048, device="cuda")
    save(tmp_path, [chunk_of("w", whole)], step=1, **EMPTY)
    box = Box((0, 512), (3000, 700))
    part = torch.zeros(3000, 700, device="cuda", dtype=torch.bfloat16)
    load(tmp_path, [Chunk("w", (3000, 2048), box, None, part)])
    assert torch.equal(part, whole[:, 512:1212].bfloat16())


def test_memory_of_the_device_is_not_copied(tmp_path):
    values = torch.randn(1 << 26, device="cuda")  # 256 MiB
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    save(tmp_path, [chunk_of("w", values)], step=1, **EMPTY)
    load(tmp_path, [chunk_of("w", values)])
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_found(dtype, bad):
    groups = ProcessGroupCollection.from_grid(RankGrid(1), 0)
    model = SmallModel(dtype=dtype, seed=5).cuda()
    weight = list(model.parameters())[-1].data.view(-1)
    weight[0] = torch.finfo(dtype).max
    assert weights_are_finite([model], groups)
    weight[-1] = bad
    assert not weights_are_finite([model], groups)
