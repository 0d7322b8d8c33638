"""Settings of data parallelism: Megatron-LM's defaults, and values that are refused."""

import pytest

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.exceptions import UserError


@pytest.mark.parametrize("name", ["check_for_large_grads"])
def test_features_still_to_come_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=name):
        DistributedDataParallelConfig(**{name: True})


def test_values_that_are_not_supported_are_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"outer_dp_sharding_strategy optim.*no_shard"):
        DistributedDataParallelConfig(outer_dp_sharding_strategy="optim")


def test_what_is_supported_is_taken() -> None:
    made = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads", bucket_size=10, overlap_grad_reduce=True
    )
    assert (made.data_parallel_sharding_strategy, made.bucket_size) == ("optim_grads", 10)
