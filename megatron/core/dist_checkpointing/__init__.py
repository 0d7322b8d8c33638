"""Checkpoints: saves tensors that are split over ranks, and loads them under any other layout."""

from megatron.core.dist_checkpointing.mapping import CheckpointingException as CheckpointingException
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject as LocalNonpersistentObject
from megatron.core.dist_checkpointing.mapping import ShardedObject as ShardedObject
from megatron.core.dist_checkpointing.mapping import ShardedTensor as ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory as ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load as load
from megatron.core.dist_checkpointing.serialization import load_common_state_dict as load_common_state_dict
from megatron.core.dist_checkpointing.serialization import load_content_metadata as load_content_metadata
from megatron.core.dist_checkpointing.serialization import load_plain_tensors as load_plain_tensors
from megatron.core.dist_checkpointing.serialization import remove_sharded_tensors as remove_sharded_tensors
from megatron.core.dist_checkpointing.serialization import save as save
from megatron.core.dist_checkpointing.validation import StrictHandling as StrictHandling
