"""Derived values and refusals of the settings that every parallel part reads."""

from typing import Any

import pytest
import torch

from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp64", torch.float64)]
)
def test_number_formats_decide_the_type_of_weights_and_messages(name: str, dtype: torch.dtype) -> None:
    config = ModelParallelConfig(**{name: True})
    assert (config.params_dtype, config.pipeline_dtype) == (dtype, dtype)
    other = ModelParallelConfig(**{name: True}, pipeline_dtype=torch.float32)
    assert (other.params_dtype, other.pipeline_dtype) == (dtype, torch.float32)


def test_a_script_may_give_the_type_itself() -> None:
    config = ModelParallelConfig(params_dtype=torch.bfloat16)
    assert (config.params_dtype, config.pipeline_dtype) == (torch.bfloat16, torch.bfloat16)


def test_sequence_parallelism_needs_tensor_parallelism() -> None:
    assert not ModelParallelConfig(sequence_parallel=True).sequence_parallel
    assert ModelParallelConfig(sequence_parallel=True, tensor_model_parallel_size=2).sequence_parallel


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are set together; choose one"),
        ({"seed": 0}, "seed 0 must be larger than 0"),
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size 0"),
        ({"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size 0"),
        ({"context_parallel_size": -1}, "context_parallel_size -1"),
        ({"expert_model_parallel_size": 0}, "expert_model_parallel_size 0"),
        ({"expert_tensor_parallel_size": 0}, "expert_tensor_parallel_size 0"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel"),
        ({"pipeline_model_parallel_comm_backend": "ucc"}, "pipeline_model_parallel_comm_backend ucc"),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        ModelParallelConfig(**fields)
    assert message in str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(UserError, match=r"(?s)seed 0.*context_parallel_size 0"):
        ModelParallelConfig(seed=0, context_parallel_size=0)
