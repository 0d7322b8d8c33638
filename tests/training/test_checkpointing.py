"""Megatron-LM's functions save and load the run that was set up last."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.small_run import SmallRun, equal

from megatron.core.exceptions import UserError
from megatron.training import global_vars
from megatron.training.checkpointing import (
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    load_checkpoint,
    read_metadata,
    save_checkpoint,
)


@pytest.fixture
def current():
    """Makes a small run the one that Megatron-LM's functions act on."""

    def make(run: SmallRun) -> SmallRun:
        config, groups = run.checkpoints.config, run.checkpoints.groups
        environment = SimpleNamespace(groups=groups)
        global_vars.set_current_run(
            SimpleNamespace(config=config, environment=environment, state=run.state, tokenizer=None, timers=None)
        )
        return run

    global_vars.clear_current_run()  # an earlier test in this process may have left one
    yield make
    global_vars.clear_current_run()


def test_megatron_lm_functions_save_and_load_the_run(tmp_path, current):
    folder = f"--save {tmp_path} --load {tmp_path}"
    run = current(SmallRun.make(folder).train(3))
    save_checkpoint(3, [run.model], run.optimizer, run.scheduler, 7e12)
    assert run.state.floating_point_operations_so_far == 3e12  # the loop's own counts are the loop's
    other = current(SmallRun.make(folder, seed=77))
    assert load_checkpoint(other.model, other.optimizer, other.scheduler) == (3, 7e12)
    run.state.floating_point_operations_so_far = 7e12
    assert equal(other.everything(), run.everything())


def test_megatron_lm_functions_say_what_there_is_not(tmp_path, current):
    run = SmallRun.make(f"--load {tmp_path}")
    parts = (run.model, run.optimizer, run.scheduler)
    with pytest.raises(UserError, match="there is no run yet"):
        load_checkpoint(*parts)
    current(run)
    assert load_checkpoint(*parts) == (0, 0.0)
    with pytest.raises(UserError, match="which is not given"):
        save_checkpoint(1, *parts, 0.0)
    with pytest.raises(UserError, match=r"save_checkpoint\(release=...\): not yet"):
        save_checkpoint(1, *parts, 0.0, release=True)
    with pytest.raises(UserError, match=r"load_checkpoint\(skip_load_to_model_and_opt=...\): not yet"):
        load_checkpoint(*parts, skip_load_to_model_and_opt=True)


def test_the_file_that_names_the_newest_checkpoint(tmp_path):
    tracker = Path(get_checkpoint_tracker_filename(tmp_path))
    with pytest.raises(UserError, match="No such file"):
        read_metadata(tracker)
    for word, expected in {"12": (12, False), "release": (0, True)}.items():
        tracker.write_text(word)
        assert read_metadata(tracker) == expected
    tracker.write_text("soon")
    with pytest.raises(UserError, match="holds 'soon'"):
        read_metadata(tracker)
    assert get_checkpoint_name(tmp_path, 12) == str(tmp_path / "iter_0000012")
    assert get_checkpoint_name(tmp_path, 0, release=True) == str(tmp_path / "release")
