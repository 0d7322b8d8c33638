"""Settings of data parallelism: Megatron-LM's defaults, and values that are refused."""

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig


def test_what_is_supported_is_taken() -> None:
    made = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads", bucket_size=10, overlap_grad_reduce=True
    )
    assert (made.data_parallel_sharding_strategy, made.bucket_size) == ("optim_grads", 10)
