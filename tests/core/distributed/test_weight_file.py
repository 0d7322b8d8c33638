"""Sharded weights in a file: no bit changes, memory is what is predicted, failures of the disk are told."""

import errno
import gc
import os
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from core.optimizer.test_host_state import BF16, F32, assert_equal
from support.pool import Pool
from support.sharding import STRATEGIES, SlicesByName, backward, groups_of, joined, small_model
from torch import Tensor

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.writing import save
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.weight_file import IN_MEMORY, FileShard, WeightFile, buffer_bytes, device_bytes
from megatron.core.exceptions import UserError
from megatron.core.optimizer import FlatOptimizer, OptimizerConfig, get_megatron_optimizer, host_state
from megatron.core.utils.scratch_file import BLOCK, padded

ZERO_3 = "optim_grads_params"


def built(
    folder: str | None, dtype: torch.dtype = BF16, name: str = ZERO_3, ranks: int = 2, **settings: Any
) -> tuple[DistributedDataParallel, FlatOptimizer]:
    model = small_model(dtype)
    words = {"grad_reduce_in_fp32": True, "param_nvme_offload_path": folder, **STRATEGIES[name]}
    config = DistributedDataParallelConfig(**words)
    ddp = DistributedDataParallel(model.config, config, model, pg_collection=groups_of(ranks))
    chosen = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.5, "bf16": dtype is BF16, **settings}
    optimizer = get_megatron_optimizer(OptimizerConfig(**chosen), [ddp])
    assert isinstance(optimizer, FlatOptimizer)
    return ddp, optimizer


def trained(ddp: DistributedDataParallel, optimizer: FlatOptimizer, steps: int = 3) -> dict[Any, Tensor]:
    """Returns losses, weights and state after steps of two micro-batches. The second step changes nothing."""
    for step in range(steps):
        ddp.zero_grad_buffer()
        backward(ddp, step, 2)
        finalize_model_grads([ddp])
        optimizer.step_on_device(torch.tensor(step != 1))
    return values([*ddp.weight_chunks(), *optimizer.state_chunks()])


def values(chunks: list[Chunk]) -> SlicesByName:
    return {(chunk.name, chunk.range): chunk.values().clone() for chunk in chunks}


def shards_of(ddp: DistributedDataParallel) -> list[FileShard]:
    return [unit.file_shard for unit in ddp.units if unit.file_shard is not None]


def no_bit_changes(folder: str, runs: list[tuple[torch.dtype, str, dict[str, Any]]]) -> bool:
    host_state.PIECE = 64
    for dtype, name, settings in runs:
        in_file: dict[str, Any] = {key: folder if value == "folder" else value for key, value in settings.items()}
        plain = trained(*built(None, dtype, name))
        ddp, optimizer = built(folder, dtype, name, **in_file)
        found, most = watched(ddp, optimizer)
        assert_equal(found, plain)
        sizes = [shard.nbytes for shard in shards_of(ddp)]
        assert len(sizes) == len(ddp.units) > IN_MEMORY + 1 and most == device_bytes(sizes), (sizes, most)
        store = shards_of(ddp)[0].store
        assert sum(buffer.memory.untyped_storage().nbytes() for buffer in store.buffers) == buffer_bytes(sizes)
        assert store.file.path.stat().st_size == BLOCK + sum(map(padded, sizes))
        with ddp.whole_weights():  # all units at once
            whole = torch.cat([unit.param_buffer.clone() for unit in ddp.units])
        state = ddp.state_dict()
        ddp.load_state_dict({key: torch.zeros_like(value) for key, value in state.items()})
        assert not any(chunk.values().any() for chunk in ddp.weight_chunks())
        ddp.load_state_dict(state)
        with ddp.whole_weights():
            assert torch.equal(whole, torch.cat([unit.param_buffer for unit in ddp.units]))
        optimizer.reload_model_params()
    return True


def watched(ddp: DistributedDataParallel, optimizer: FlatOptimizer) -> tuple[dict[Any, Tensor], int]:
    """Returns what `trained` does, and the most bytes on the device that shards had when one came in."""
    most, fetch = 0, FileShard.fetch

    def fetching(shard: FileShard, changes: bool = False) -> None:
        nonlocal most
        fetch(shard, changes)
        assert shard.tensor.untyped_storage().nbytes() == shard.nbytes
        most = max(most, sum(each.tensor.untyped_storage().nbytes() for each in shards_of(ddp)))

    with mock.patch.object(FileShard, "fetch", fetching):
        found = trained(ddp, optimizer)
    return found, most


OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
RUNS: list[tuple[torch.dtype, str, dict[str, Any]]] = [
    (BF16, ZERO_3, {}),
    (BF16, f"{ZERO_3}, plain", {}),
    (F32, ZERO_3, {}),
    (F32, ZERO_3, {**OFFLOAD, "optimizer_offload_fraction": 0.5}),
    (BF16, ZERO_3, {**OFFLOAD, "optimizer_nvme_offload_path": "folder"}),
]


def test_no_bit_changes_and_memory_is_as_predicted(pool: Pool, tmp_path: Path) -> None:
    """Two micro-batches, so that every shard is read four times a step."""
    assert pool.run(no_bit_changes, 2, str(tmp_path), RUNS) == [True, True]


def train_and_save(folder: str | None, dtype: torch.dtype, root: str) -> SlicesByName:
    ddp, optimizer = built(folder, dtype)
    found = trained(ddp, optimizer, 1)
    chunks = [*ddp.weight_chunks(), *optimizer.state_chunks()]
    common = optimizer.common_state()
    save(Path(root), chunks, step=1, common=common, config={}, layout={}, group=ddp.pg_collection.dp_cp)
    return found


def load_and_train(
    folder: str | None, name: str, ranks: int, dtype: torch.dtype, root: str
) -> tuple[SlicesByName, SlicesByName]:
    ddp, optimizer = built(folder, dtype, name, ranks)
    trained(ddp, optimizer, 1)  # loads over other numbers
    chunks = [*ddp.weight_chunks(), *optimizer.state_chunks()]
    loaded = load(Path(root), chunks, group=ddp.pg_collection.dp_cp, log=lambda *words: None)
    assert loaded is not None
    optimizer.load_common_state(loaded.manifest.common)
    return values(chunks), trained(ddp, optimizer, 1)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F32, marks=pytest.mark.slow)])
def test_checkpoints_do_not_know(pool: Pool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Saved with a file, loaded without one under another layout, and the other way round."""
    disk, roots = tmp_path / "disk", [tmp_path / "in_file", tmp_path / "plain"]
    disk.mkdir()
    written = [
        joined(pool.run(train_and_save, 2, folder, dtype, str(root)))
        for folder, root in zip((str(disk), None), roots, strict=True)
    ]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[0])
    files = [sorted(path for path in root.rglob("*") if path.is_file()) for root in roots]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    after = []
    for folder, name, ranks, root in (
        (None, ZERO_3, 2, roots[0]),
        (str(disk), ZERO_3, 2, roots[1]),
        (None, ZERO_3, 4, roots[0]),
        (str(disk), ZERO_3, 4, roots[1]),
        (None, "optim", 2, roots[0]),
    ):
        answers = pool.run(load_and_train, ranks, folder, name, ranks, dtype, str(root))
        read = joined([found for found, _ in answers])
        assert read.keys() == written[0].keys()
        assert all(torch.equal(read[key], written[0][key]) for key in read), (name, ranks)
        after.append(joined([found for _, found in answers]))
    assert all(torch.equal(after[0][key], after[1][key]) for key in after[0])
    assert all(torch.equal(after[2][key], after[3][key]) for key in after[2])


def refusals(folder: str) -> list[str]:
    said = []
    for dtype, name, settings in (
        (BF16, "optim", {}),
        (BF16, ZERO_3, {"ema_decay": 0.9}),
        (BF16, ZERO_3, {"optimizer": "muon"}),
        (BF16, ZERO_3, {"use_precision_aware_optimizer": True}),
    ):
        with pytest.raises(UserError) as told:
            built(folder, dtype, name, **settings)
        said.append(str(told.value))
    ddp, _ = built(folder)
    with pytest.raises(UserError, match="weights in memory"):
        ddp.hold_weight_shards()
    return said


def test_what_needs_all_weights_is_refused(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(refusals, 2, str(tmp_path))[0]
    assert said[0].startswith(f"--param-nvme-offload-path {tmp_path}: no weights are sharded over ranks")
    for words, text in zip(("ema_decay", "optimizer muon", "main weights kept as remainders"), said[1:], strict=True):
        assert text == f"param_nvme_offload_path: not with {words}, which needs the weights in memory"


# ---------------------------------------------------------------------------------------------------------------------
# One process


def in_a_file(folder: Path, shards: int = 6, numel: int = 3000) -> list[FileShard]:
    store = WeightFile(str(folder), 0, torch.device("cpu"), 4 * numel)
    return [FileShard(store, torch.full((numel,), float(number)), lambda: None) for number in range(shards)]


def test_shards_come_and_go(tmp_path: Path) -> None:
    """Many reads ahead that are not used, and changes while they run."""
    shards = in_a_file(tmp_path)
    expected = [float(number) for number in range(6)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        number, ahead, action = torch.randint(0, 6, (3,), generator=generator).tolist()
        shards[ahead].read_ahead()
        shards[number].fetch(changes=action < 3)
        assert (shards[number].tensor == expected[number]).all()
        if action < 3:
            shards[number].tensor += 1
            expected[number] += 1
        if action == 0:
            shards[number].release()
        memory = [shard.tensor.untyped_storage().nbytes() for shard in shards]
        assert sum(memory) <= device_bytes([shard.nbytes for shard in shards])
        assert [size > 0 for size in memory] == [shard.is_in_memory for shard in shards]
    path = shards[0].store.file.path
    assert path.name.startswith("weights-rank0-") and path.read_bytes().startswith(b"Weights of a training run.")
    del shards
    end = time.monotonic() + 60
    while list(tmp_path.iterdir()) and time.monotonic() < end:  # threads hold the file until their work ends
        gc.collect()
        time.sleep(0.1)
    assert not list(tmp_path.iterdir())


def test_a_cut_file_is_told(tmp_path: Path) -> None:
    shards = in_a_file(tmp_path)
    shards[1].fetch()
    shards[0].fetch()  # all writes have ended
    os.truncate(shards[0].store.file.path, BLOCK)
    told = re.escape(f"--param-nvme-offload-path {tmp_path}: ") + "weights-rank0-.* has been cut at .* last checkpoint"
    with pytest.raises(UserError, match=told):
        shards[3].fetch()
    with pytest.raises(UserError, match=told):  # nothing is saved any more, also of what is in memory
        shards[0].fetch()


def test_a_full_disk_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = in_a_file(tmp_path, 1)

    def full(*place: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    told = re.escape(f"--param-nvme-offload-path {tmp_path}: No space left on device: ") + ".* --dry-run tells"
    with pytest.raises(UserError, match=told):
        FileShard(shards[0].store, torch.zeros(3000), lambda: None)


def test_a_failed_write_is_told_and_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = in_a_file(tmp_path)
    shards[0].fetch(changes=True)

    def failing(*transfer: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", failing)
    told = re.escape(f"--param-nvme-offload-path {tmp_path}: ") + ".* cannot be written: Input/output error. Resume"
    with pytest.raises(UserError, match=told):
        shards[0].release()
        shards[0].fetch()
    monkeypatch.setattr(os, "pwritev", write)
    for shard in shards:
        with pytest.raises(UserError, match=told):
            shard.fetch()
