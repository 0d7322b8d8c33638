"""megatron/data/datasets/blend_stages.py: the file of stages, and the order of samples over stages."""

import json

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.blend_stages import BlendStage, StageOrder, last_blend, read_stages_file

STAGES = [
    BlendStage(0, ("a", "b"), (0.75, 0.25)),
    BlendStage(40, ("b", "c"), (0.5, 0.5)),
    BlendStage(100, ("a",), (1.0,)),
]


def written(tmp_path, content):
    (tmp_path / "stages.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(tmp_path / "stages.json")


def test_the_file(tmp_path):
    content = [
        {"from_sample": 0, "data_path": ["3", "a", "1", "b"]},
        {"from_sample": 40, "data_path": "50 b 50 c"},
        {"from_sample": 100, "data_path": ["a"]},
    ]
    stages = read_stages_file(written(tmp_path, content))
    assert stages == STAGES and last_blend(stages) == (["a"], [1.0])


def test_rules_change_the_weights_of_a_stage(tmp_path):
    stage = {"from_sample": 0, "data_path": "900 a 100 b 25 c"}

    def weights(**rules):
        return read_stages_file(written(tmp_path, [stage | rules]))[0].weights

    assert weights(temperature=2) == pytest.approx((30 / 45, 10 / 45, 5 / 45))
    assert weights(cap=100) == pytest.approx((100 / 225, 100 / 225, 25 / 225))
    assert weights(cap=100, temperature=2) == pytest.approx((10 / 25, 10 / 25, 5 / 25))


def test_the_plan_is_what_the_weights_say():
    order = StageOrder(STAGES, 120)
    assert order.planned(20).tolist() == [15.0, 5.0, 0.0]
    assert order.planned(60).tolist() == [30.0, 20.0, 10.0]
    assert order.planned(120).tolist() == [50.0, 40.0, 30.0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"from_sample": 0, "data_path": "1 a 1 b", "temperature": 0}], "stage 1: temperature is 0, not a number ab"),
        ([{"from_sample": 0, "data_path": "1 a 1 b", "cap": "1"}], 'stage 1: cap is "1", not a number above 0'),
        ([{"from_sample": 0, "data_path": "a", "cap": 1}], "stage 1: cap changes weights, and data_path has none"),
        ([{"from_sample": 0, "data_path": "1 a 1 b", "Cap": 1}], r"keys data_path, from_sample \(also: cap, temp"),
        (
            [{"from_sample": 0, "data_path": "2 a 1 b", "temperature": 1e-9}],
            "stage 1: temperature 1e-09 makes weights too",
        ),
        ([{"from_sample": 0, "data_path": 5}], "stage 1: data_path is 5, not a text or a list of words"),
        ("{", "not JSON"),
        ([], "expected a list of stages"),
        ([{"from_sample": 0}], "stage 1: expected an object with the keys data_path, from_sample"),
        ([{"from_sample": 5, "data_path": "a"}], "stage 1: from_sample is 5; it must be 0"),
        ([{"from_sample": 0, "data_path": "a"}] * 2, "stage 2: .* must be more than 0"),
        ([{"from_sample": 0, "data_path": "a b"}], "stage 1: .*weight"),
        ([{"from_sample": 0, "data_path": "1 a 1 a"}], "stage 1: a prefix is named twice"),
        ([{"from_sample": 0, "data_path": "-1 a 2 b"}], "stage 1: .*-1"),
        ([{"from_sample": "0", "data_path": "a"}], 'stage 1: from_sample is "0", not a number'),
        ([{"from_sample": 0, "data_path": 7}], "stage 1: "),
    ],
)
def test_mistakes_are_named(tmp_path, content, says):
    with pytest.raises(UserError, match=rf"--data-stages .*stages.json: .*{says}"):
        read_stages_file(written(tmp_path, content))


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"--data-stages .*none: No such file"):
        read_stages_file(str(tmp_path / "none"))


def test_each_stage_has_its_blend_and_datasets_go_on():
    order = StageOrder(STAGES, 130)
    found = [order.locate(sample) for sample in range(130)]
    for dataset in range(3):  # consecutive numbers over all stages
        numbers = [number for which, number in found if which == dataset]
        assert numbers == list(range(len(numbers)))
    counts = [np.bincount([which for which, _ in found[a:b]], minlength=3).tolist() for a, b in ((0, 40), (40, 100))]
    assert counts == [[30, 10, 0], [0, 30, 30]] and {which for which, _ in found[100:]} == {0}
    for consumed in (1, 39, 40, 41, 99, 130):
        stage, of_stage, of_run = order.taken(consumed)
        assert stage == order.stage_of(consumed - 1)
        assert of_run.tolist() == np.bincount([which for which, _ in found[:consumed]], minlength=3).tolist()
        assert of_stage.sum() == consumed - order.starts[stage]


def test_long_stages_are_counted_by_blocks():
    order = StageOrder([BlendStage(0, ("a", "b"), (0.3, 0.7))], 100_000)
    for consumed in (16_384, 50_000, 100_000):
        part = order.orders[0].indices(0, consumed)
        assert order.taken(consumed)[2].tolist() == np.bincount(part.dataset_index, minlength=2).tolist()
