"""Settings of data parallelism: Megatron-LM's defaults, and values that are refused."""

import dataclasses

import pytest

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.exceptions import UserError


def test_sharding_over_groups_of_shards_is_still_to_come() -> None:
    one = DistributedDataParallelConfig(use_megatron_fsdp=True, outer_dp_sharding_strategy="optim")
    with pytest.raises(UserError, match=r"outer_dp_sharding_strategy optim with .* 2: not yet"):
        dataclasses.replace(one, num_distributed_optimizer_instances=2)


def test_what_is_supported_is_taken() -> None:
    made = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads", bucket_size=10, overlap_grad_reduce=True
    )
    assert (made.data_parallel_sharding_strategy, made.bucket_size) == ("optim_grads", 10)
