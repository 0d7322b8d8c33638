"""All private names of torch that this project uses.

torch may change them in any release, so this is the only file to check for a new release. Its test lists the releases
it was tried with (`TRIED_RELEASES`), and checks that every name exists in the installed release and that no other file
of megatron/ or tools/ uses a private name.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

TRIED_RELEASES = ("2.11", "2.13")
"""Releases of torch with which the tests passed."""

# ---------------------------------------------------------------------------------------------------------------------
# Operations

foreach_copy_ = torch._foreach_copy_
"""Copies each tensor of a list to that of another list."""
foreach_norm = torch._foreach_norm
"""Norms of a list of tensors."""
"""Multiplies each tensor of a list in place."""
foreach_zero_ = torch._foreach_zero_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_
grouped_mm: Callable[..., torch.Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm
"""Matrix products of groups of rows; public in newer releases."""
scaled_mm = torch._scaled_mm
"""Product of two fp8 matrices and their scales, on GPUs with fp8 units."""
index_put_unchecked_ = torch._index_put_impl_
"""`index_put_` with an argument that switches off the check for indices out of range, which waits for a GPU."""
flash_attention_forward = torch.ops.aten._flash_attention_forward
flash_attention_backward = torch.ops.aten._flash_attention_backward
flash_attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cudnn_attention_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Context manager: `__torch_function__` of tensor subclasses is not called inside."""


def storage_address(storage: torch.UntypedStorage) -> int:
    """Returns the address of a storage; of one on the meta device, which has no memory, that of its description."""
    return storage._cdata


@contextlib.contextmanager
def run_backward_within(mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Inside the context, each backward runs inside `mode`, a TorchFunctionMode. torch leaves such a mode before it
    starts a backward, and so before it calls the backward functions of our operations."""
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_within(*arguments: Any, **options: Any) -> Any:
        with mode:
            return run(*arguments, **options)

    torch.autograd._engine_run_backward = run_within  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]


def sleep_on_gpu(cycles: int) -> None:
    """Keeps the current CUDA stream busy for this number of clock cycles."""
    torch.cuda._sleep(cycles)


def end_allocation_to_pool(device: torch.device, pool: Any) -> None:
    """Ends the use of a memory pool of CUDA graphs for a capture on this device, which has an index. Raises
    RuntimeError if no capture uses the pool."""
    torch._C._cuda_endAllocateToPool(device.index, pool)


def allocate_symmetric_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocates uint8 memory that other GPUs can write into after `share_symmetric_memory`. Raises RuntimeError if this
    GPU has no such memory left, or none at all."""
    # Builds of torch for computers without GPUs may lack it.
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


def share_symmetric_memory(own: torch.Tensor, group: ProcessGroup) -> Any:
    """Returns torch's handle of the memory of all ranks of the group, which call this together: a rank that does not
    keeps the others waiting. Raises RuntimeError if the GPUs cannot access each other's memory."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(own, group)


def record_memory_history(max_entries: int | None) -> None:
    """Starts to record allocations of GPU memory with their stacks, up to `max_entries`; None ends the recording."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_snapshot(path: str) -> None:
    """Writes the recorded allocations as a file for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def profiler_config_of_all_threads() -> Any:
    """Returns the setting with which torch.profiler records all threads of the process."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


# ---------------------------------------------------------------------------------------------------------------------
# Autograd


def in_backward() -> bool:
    """Whether this thread computes a node of a backward pass, or recomputes a forward inside one."""
    return torch._C._current_graph_task_id() != -1


class BackwardEndCallback:
    """Calls a function once at the end of every backward pass in which `expect` was called."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._last_task_id: int | None = None

    def expect(self) -> None:
        """Requests the call at the end of the backward pass that is running. Does nothing outside of a backward
        pass."""
        task_id = torch._C._current_graph_task_id()
        if task_id not in (-1, self._last_task_id):
            self._last_task_id = task_id
            torch.autograd.Variable._execution_engine.queue_callback(self._function)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------------------
# Process groups


@contextlib.contextmanager
def local_group_named(name: str) -> Iterator[None]:
    """Gives this name to groups that `torch.distributed.new_group` makes inside the context with local
    synchronization."""
    hash_ranks = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = hash_ranks


def set_group_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> None:
    """Sets how long collectives of a group (default: the world) may take."""
    distributed_c10d._set_pg_timeout(timeout, group)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints of torch.distributed.checkpoint


class DistFolderWriter:
    """Writes tensors and objects one by one into a data file of torch.distributed.checkpoint; makes its metadata."""

    def __init__(self, data_file: str) -> None:
        from torch.distributed.checkpoint import filesystem, metadata

        self._storage_info, self._types, self._data_file = filesystem._StorageInfo, metadata, data_file
        self._entries: dict[str, Any] = {}
        self._places: dict[Any, Any] = {}

    def add_tensor(
        self, file: BinaryIO, name: str, shape: Sequence[int], start: Sequence[int], values: torch.Tensor
    ) -> None:
        """Writes a box of the tensor `name`, which has this shape and begins at the index `start`."""
        types = self._types
        if name not in self._entries:
            properties = types.TensorProperties(dtype=values.dtype)
            self._entries[name] = types.TensorStorageMetadata(properties, torch.Size(shape), [])
        box = types.ChunkStorageMetadata(torch.Size(start), values.size())
        self._entries[name].chunks.append(box)
        self._write(file, types.MetadataIndex(name, torch.Size(start)), values)

    def add_object(self, file: BinaryIO, name: str, value: object) -> None:
        """Writes an object."""
        self._entries[name] = self._types.BytesStorageMetadata()
        self._write(file, self._types.MetadataIndex(name), value)

    def metadata(self, first: Sequence[str] = ()) -> Any:
        """Returns the object whose pickle is the folder's `.metadata`. The names `first` are there before all others,
        in this order."""
        entries = {name: self._entries[name] for name in first} | self._entries
        return self._types.Metadata(entries, storage_data=self._places)

    def _write(self, file: BinaryIO, index: object, value: Any) -> None:
        begin = file.tell()
        torch.save(value, file)
        self._places[index] = self._storage_info(self._data_file, begin, file.tell() - begin)


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


def import_compiler() -> None:
    """Imports torch's compiler, which takes a second, before a function of torch does."""
    importlib.import_module("torch._dynamo")
