"""Parts of parameters on a rank, their boxes, and how they are made."""

import pytest
import torch

from megatron.core.communication.collectives import PlannedGroup
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.initializers import Constant
from megatron.core.parameters import Box, info_of
from megatron.core.tensor_parallel.storage import new_parameter, new_split_vector, part_size, split_box, with_columns

SECOND_OF_THREE = PlannedGroup((3, 4, 5), 1)


def test_boxes_tile_the_tensor_along_one_dimension() -> None:
    assert split_box((4, 6), 1, SECOND_OF_THREE) == Box((0, 2), (4, 2))
    assert split_box((4, 6), 0, None) == Box((0, 0), (4, 6))
    assert with_columns(Box((2,), (3,)), 7) == Box((2, 0), (3, 7))


@pytest.mark.parametrize(("whole", "works"), [(7, "use 6 or 9"), (2, "; use 3")])
def test_a_size_that_does_not_divide_is_refused_with_what_does(whole: int, works: str) -> None:
    assert part_size(6, SECOND_OF_THREE, "heads") == 2
    with pytest.raises(UserError, match=f"heads: {whole} is not divisible by 3 tensor parallel ranks.*{works}"):
        part_size(whole, SECOND_OF_THREE, "heads")


def test_a_parameter_has_the_configs_type_its_values_and_no_values_in_its_padding() -> None:
    config = ModelParallelConfig(bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=True)
    made = new_parameter(config, (4, 2), Constant(3.0), global_shape=(3, 2), box=Box((0, 0), (3, 2)))
    assert made.dtype is torch.bfloat16 and made[:3].eq(3).all() and not made[3:].any()
    assert info_of(made).global_shape == (3, 2)


def test_without_initialization_and_on_the_meta_device_nothing_is_drawn() -> None:
    def refuse(tensor: torch.Tensor) -> None:
        raise AssertionError("drawn")

    config = ModelParallelConfig(perform_initialization=False, use_cpu_initialization=True)
    new_parameter(config, (2,), refuse)  # type: ignore[arg-type]
    with torch.device("meta"):
        assert new_parameter(ModelParallelConfig(), (2,), refuse).is_meta  # type: ignore[arg-type]


def test_ranks_divide_a_vector() -> None:
    vector = new_split_vector(ModelParallelConfig(), 6, Constant(3.0), SECOND_OF_THREE)
    info = info_of(vector)
    assert vector.tolist() == [3.0, 3.0] and (info.global_shape, info.box) == ((6,), Box((2,), (2,)))
    assert info.sharded_axes == {"tp"}
