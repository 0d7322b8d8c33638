"""The sharded state dict of a module, built from the descriptors of its parameters."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.sharding_strategy import replica_ranks
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.parameters import ParameterInfo, canonical_name, info_of


class ShardedStateModule(nn.Module):
    """A module with a `sharded_state_dict`, for checkpoints."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns a ShardedTensor for each entry of the state dict, under the entry's name with `prefix`.

        They are views of the live parameters in their canonical shape (that of a gated MLP is [2, ffn, h]) and without
        padding, stored under their canonical names: layers by their number over the whole model, a tied head under the
        embedding's name. Loaded values fit `load_state_dict`. `metadata` has no effect. Raises UserError for
        `sharded_offsets`: layers are not stacked into one tensor here.
        """
        if sharded_offsets:
            raise UserError(
                f"sharded_state_dict(sharded_offsets={sharded_offsets}): layers are stored under names of their own, "
                "not stacked along a new axis; leave it out"
            )
        groups = groups_or_default(getattr(self, "pg_collection", None))
        return dict(sharded_entries(self, prefix, groups))


def sharded_entries(
    module: nn.Module, prefix: str, groups: ProcessGroupCollection
) -> Iterator[tuple[str, ShardedTensor]]:
    """Returns the entries of `ShardedStateModule.sharded_state_dict` for any module."""
    entries = list(_entries(module, "", ""))
    # The model that named the parameters, or a part of it whose path in the model is the prefix?
    is_model = any(info_of(tensor).name == path for _, path, tensor in entries)
    for local, path, tensor in entries:
        info = info_of(tensor)
        key = prefix + canonical_name(path, info) if is_model else canonical_name(prefix + path, info)
        yield prefix + local, _sharded(key, tensor, info, groups)


def _entries(module: nn.Module, local: str, canonical: str) -> Iterator[tuple[str, str, Tensor]]:
    """Yields, for each entry of a module's state dict: its name there, its path with layer numbers over the whole
    model, and its tensor."""
    left_out = module._non_persistent_buffers_set
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in left_out:
            yield local + name, canonical + name, tensor
    for name, child in module._modules.items():
        if child is not None:
            number = getattr(child, "canonical_index", None) if isinstance(module, nn.ModuleList) else None
            yield from _entries(child, f"{local}{name}.", f"{canonical}{name if number is None else number}.")


def _sharded(key: str, tensor: Tensor, info: ParameterInfo, groups: ProcessGroupCollection) -> ShardedTensor:
    stored, box = tensor.detach(), info.box
    holders = replica_ranks(info, groups)
    return ShardedTensor(
        key,
        stored.view(-1)[: box.numel].view(box.shape),
        stored.dtype,
        box.shape,
        info.global_shape,
        box.start,
        None,
        replica_id=holders.index(groups.global_rank),
        holders=holders,
        stored=stored,
    )


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: object = None,
    prepend_offsets: tuple[tuple[int, int, int], ...] = (),
    **kwargs: Any,
) -> ShardedTensor:
    """Returns this tensor parallel rank's part of a tensor that the ranks split evenly along `tp_axis`. Megatron-LM's
    function for a module's own `sharded_state_dict`. Data parallel rank 0 writes it."""
    groups = groups_or_default(None)
    offset = (tp_axis + len(prepend_offsets), groups.rank("tp"), groups.size("tp"))
    return _of_module(
        tensor, key, (*prepend_offsets, offset), (groups.rank("dp_cp"),), replica_id, prepend_offsets, kwargs
    )


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: tuple[tuple[int, int, int], ...] = (),
    replica_id: Any = None,
    **kwargs: object,
) -> ShardedTensor:
    """Returns a sharded tensor that is whole on every tensor and data parallel rank. Megatron-LM's function for a
    module's own `sharded_state_dict`. The first of these ranks writes it."""
    groups = groups_or_default(None)
    copies = (groups.rank("tp"), groups.rank("dp_cp"))
    return _of_module(tensor, key, prepend_offsets, copies, replica_id, prepend_offsets, kwargs)


def _of_module(
    tensor: Tensor,
    key: str,
    offsets: Any,
    copies: tuple[int, ...],
    replica_id: Any,
    prepended: Any,
    fields: dict[str, Any],
) -> ShardedTensor:
    fields = {name: value for name, value in fields.items() if name == "allow_shape_mismatch"}
    return ShardedTensor.from_rank_offsets(
        key,
        tensor.detach(),
        *offsets,
        replica_id=copies if replica_id is None else replica_id,
        prepend_axis_num=len(prepended),
        **fields,
    )


def make_sharded_tensors_for_checkpoint(
    state_dict: Mapping[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: tuple[tuple[int, int, int], ...] = (),
    extra_state_suffix: str = "_extra_state",
) -> dict[str, object]:
    """Returns a sharded tensor for each entry of a module's state dict, under its name with `prefix`: split along the
    axis that the map names, or whole on every rank. Entries of extra state are left out."""
    axes = tensor_parallel_layers_axis_map or {}
    found: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        if name.endswith(extra_state_suffix):
            continue
        key = f"{prefix}{name}"
        if name in axes:
            found[key] = make_tp_sharded_tensor_for_checkpoint(tensor, key, axes[name], prepend_offsets=sharded_offsets)
        else:
            found[key] = make_sharded_tensor_for_checkpoint(tensor, key, sharded_offsets)
    return found


def sharded_state_dict_default(
    module: nn.Module,
    prefix: str = "",
    sharded_offsets: tuple[tuple[int, int, int], ...] = (),
    metadata: dict[str, Any] | None = None,
) -> dict[str, object]:
    """Returns the module's own `sharded_state_dict`. For a module without one, returns its state dict as tensors that
    are whole on every rank."""
    if hasattr(module, "sharded_state_dict"):
        return module.sharded_state_dict(prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata)  # type: ignore[operator]
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
    )
