"""The schemas know everything that a run writes. tests/training/test_forged_checkpoints.py changes each field."""

from megatron.core.dist_checkpointing.manifest_schema import RUN_STATE, TRAIN_STATE, problem_in_manifest
from megatron.core.schedule.optimizer_param_scheduler import STATE_NAMES
from megatron.training.state import TrainState

MANIFEST = {"iteration": 3, "indexes": {}, "common": {}, "config": {}, "layout": {}}


def test_all_counts_and_all_settings_of_the_schedule_are_checked():
    assert TRAIN_STATE.optional.keys() == TrainState().to_json().keys()
    assert RUN_STATE.required["scheduler"].optional.keys() == set(STATE_NAMES)
    assert TRAIN_STATE.problem(TrainState(3, 2, 1, 0, 7, 1.5e30).to_json()) is None


def test_the_state_is_that_of_a_run_only_if_the_checkpoint_describes_one():
    """`dist_checkpointing.save` takes any state, also under these names."""
    common = {"train_state": "anything", "optimizer": [1]}
    assert problem_in_manifest({**MANIFEST, "common": common}) is None
    found = problem_in_manifest({**MANIFEST, "common": common, "config": {"torch": "2.9"}})
    assert found == 'common.train_state is "anything", not an object'


def test_an_older_release_wrote_less():
    common = {"train_state": {"iteration": 2}, "scheduler": {"num_steps": 8}, "optimizer": None}
    assert problem_in_manifest({**MANIFEST, "common": common, "config": {"command_line": []}}) is None
