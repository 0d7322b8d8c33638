"""megatron/data/datasets/blended_megatron_dataset_config.py: what fits together and what is taken by default."""

import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig

BLEND = (["a", "b"], None)


def test_without_a_split_megatron_lms_one_is_taken_and_said(caplog):
    config = BlendedMegatronDatasetConfig(1, 8, blend=BLEND)
    assert config.split == "969,30,1"
    assert config.split_matrix == [(0, 0.969), (0.969, 0.999), (0.999, 1.0)]
    assert "test data as 969,30,1" in caplog.text


@pytest.mark.parametrize("given", [{"split": "90,5,5"}, {"blend_per_split": [None] * 3}, {"mock": True}])
def test_without_data_there_is_mock_data(given, caplog):
    config = BlendedMegatronDatasetConfig(1, 8, **given)
    assert config.mock
    assert config.split == "1,1,1"
    assert ("no data is given" in caplog.text) == ("mock" not in given)


def test_blends_of_each_split_are_used_whole():
    config = BlendedMegatronDatasetConfig(1, 8, blend_per_split=[BLEND, None, BLEND])
    assert not config.mock
    assert config.split is None
    assert config.split_matrix is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 0}, "sequence_length 0"),
        ({"random_seed": -1}, "--seed -1"),
        ({"num_dataset_builder_threads": 0}, "--num-dataset-builder-threads 0"),
        ({"blend_per_split": [BLEND] * 3}, "not both"),
        ({"blend": None, "blend_per_split": [BLEND] * 2}, "expected 3"),
        ({"blend": None, "blend_per_split": [BLEND] * 3, "split": "9,1,0"}, "--split 9,1,0"),
        ({"blend": (["a"], [1.0, 2.0])}, "2 weights for 1"),
        ({"blend": (["a"], [-1.0])}, "-1.0"),
        ({"blend": ([], None)}, "at least one prefix"),
        ({"split": "x"}, "--split x"),
        ({"blend": (["a"], [1.0]), "multiple_validation_sets": True}, "--multiple-validation-sets"),
    ],
)
def test_what_does_not_fit_together_is_named(changes, message):
    arguments = {"random_seed": 1, "sequence_length": 8, "blend": BLEND, "split": "1"} | changes
    if arguments["blend"] is None and "split" not in changes:
        arguments["split"] = None
    with pytest.raises(UserError, match=message):
        BlendedMegatronDatasetConfig(**arguments)
