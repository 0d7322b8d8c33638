"""Tags and values that reach TensorBoard, read back from its files."""

import errno
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from support.programs import python

from megatron.core.exceptions import UserError
from megatron.training.log.records import Speed, StepRecord, TaskRecord, ValidationRecord
from megatron.training.log.tensorboard import ScalarLog, TagChoices, tensorboard_log, wandb_log
from megatron.training.state import TrainState


def record(log):
    speed = Speed(0.5, 100.0, 12.0, 0.4)
    steps = [
        StepRecord(
            iteration,
            {"lm loss": float(iteration)},
            consumed_samples=4 * iteration,
            global_batch_size=4,
            learning_rate=0.1,
            decoupled_learning_rate=0.2,
            loss_scale=2.0,
            grad_norm=0.5,
            num_zeros=3,
            params_norm=7.0,
        )
        for iteration in (1, 2, 3, 4)
    ]
    log.steps(steps, speed)
    log.validation(ValidationRecord(4, {"lm loss": 0.0}, consumed_samples=16))
    log.task(TaskRecord(4, "capitals", {"acc": (0.5, 0.1), "perplexity": (9.0, None)}, 26, consumed_samples=16))
    log.close()


def scalars(choices):
    found = {}
    record(ScalarLog(lambda tag, value, at: found.setdefault(tag, []).append((at, value)), choices))
    return found


def test_megatron_lm_tags_and_values():
    found = scalars(TagChoices())
    steps = {"lm loss", "learning-rate", "grad-norm", "loss-scale", "batch-size", "num-zeros", "params-norm"}
    steps |= {"decoupled-learning-rate"}
    assert {tag for tag in found if not tag.endswith(" vs samples")} == steps | {
        "lm loss validation",
        "throughput",
        "mfu",
        "eval/capitals/acc",
        "eval/capitals/acc stderr",
        "eval/capitals/perplexity",
    }
    assert found["eval/capitals/acc stderr"] == [(4, 0.1)]
    assert found["lm loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert found["lm loss vs samples"] == [(4, 1.0), (8, 2.0), (12, 3.0), (16, 4.0)]
    assert found["lm loss validation"] == [(4, 0.0)]
    assert found["lm loss validation vs samples"] == [(16, 0.0)]


def test_optional_tags():
    everything = TagChoices(
        tensorboard_log_interval=2,
        log_timers_to_tensorboard=True,
        log_loss_scale_to_tensorboard=False,
        log_validation_ppl_to_tensorboard=True,
        log_memory_to_tensorboard=True,
        log_world_size_to_tensorboard=True,
        world_size=8,
    )
    found = scalars(everything)
    assert [at for at, _ in found["lm loss"]] == [2, 4]
    assert "loss-scale" not in found
    assert found["iteration-time"] == [(4, 0.5)]
    assert found["world-size"] == [(4, 8)]
    assert found["lm loss validation ppl"] == [(4, 1.0)]
    assert found["mem-host-resident-bytes"][0][1] > 1 << 20


def points_of(folder, tag):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_steps_beyond_the_checkpoint_are_moved_aside(tmp_path, capsys):
    """A run that has died after iteration 4 goes on from iteration 2; a script's own steps are of another unit."""
    pytest.importorskip("tensorboard")
    first = tensorboard_log(tmp_path, TagChoices())
    first.tensorboard.add_scalar("tokens of mine", 1.0, 10**9)
    record(first)
    again = tensorboard_log(tmp_path, TagChoices(), state=TrainState(iteration=2, consumed_train_samples=8))
    assert "points beyond iteration 2: moved to " in capsys.readouterr().out
    for number in (3, 4):
        again.steps([StepRecord(number, {"lm loss": 0.0}, consumed_samples=4 * number)], Speed(0.5, 100.0, None, None))
    again.close()
    assert points_of(tmp_path, "lm loss") == [(1, 1.0), (2, 2.0), (3, 0.0), (4, 0.0)]
    assert points_of(tmp_path, "lm loss vs samples") == [(4, 1.0), (8, 2.0), (12, 0.0), (16, 0.0)]
    assert points_of(tmp_path, "tokens of mine") == [(10**9, 1.0)]
    tensorboard_log(tmp_path, TagChoices()).close()  # a run from the start
    assert not any(path.stat().st_size > 200 for path in tmp_path.glob("*tfevents*"))


def test_a_run_that_goes_back_or_evaluates_again_has_each_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    state = TrainState()
    log = tensorboard_log(tmp_path, TagChoices(), state=state)
    record(log)
    state.iteration, state.consumed_train_samples = 3, 12
    log.went_back(3)
    record(log)
    assert [step for step, _ in points_of(tmp_path, "lm loss")] == [1, 2, 3, 1, 2, 3, 4]
    state.iteration, state.consumed_train_samples = 4, 16
    tensorboard_log(tmp_path, TagChoices(), state=state, evaluates_again=True).close()
    assert [step for step, _ in points_of(tmp_path, "lm loss")] == [1, 2, 3, 1, 2, 3, 4]
    for tag in ("lm loss validation", "eval/capitals/acc"):
        with pytest.raises(KeyError):
            points_of(tmp_path, tag)


def test_a_full_disk_drops_points_but_not_the_run(tmp_path, monkeypatch, capsys):
    calls = []

    class Full:
        def __init__(self, **arguments):
            pass

        def add_scalar(self, *arguments):
            calls.append(arguments)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Full)
    record(tensorboard_log(tmp_path, TagChoices()))
    assert len(calls) == 1
    assert f"--tensorboard-dir {tmp_path}: No space left on device; points are dropped" in capsys.readouterr().out


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"--tensorboard-dir .* package tensorboard"):
        tensorboard_log(tmp_path, TagChoices())
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"--wandb-project mine .* package wandb"):
        wandb_log("mine", TagChoices(), name="run")


def test_a_folder_of_wandb_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(UserError, match=r"--wandb-save-dir .*/file/runs cannot be written: Not a directory"):
        wandb_log("mine", TagChoices(), name="run", save_dir=str(tmp_path / "file/runs"))


def test_a_resumed_run_continues_its_run_of_wandb(monkeypatch, tmp_path):
    """A new run, and one that is branched into another folder, gets an id of its own."""
    asked = []

    class FakeWandb:
        Error = RuntimeError

        @staticmethod
        def init(*, project, name, entity, dir, config, **identity):
            asked.append(identity)
            return SimpleNamespace(id=identity.get("id", f"new{len(asked)}"), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    for folder, resumed in (
        ("a", False),
        ("a", True),
        ("a", True),
        ("b", True),
        ("b", True),
        ("a", False),
        ("a", True),
    ):
        wandb_log("mine", TagChoices(), name="run", id_file=tmp_path / folder / "id", resumed=resumed)
    continued = [identity.get("id") for identity in asked]
    assert continued == [None, "new1", "new1", None, "new4", None, "new6"]
    assert asked[1] == {"id": "new1", "resume": "allow"}
    monkeypatch.setenv("WANDB_RUN_ID", "given")
    wandb_log("mine", TagChoices(), name="run", id_file=tmp_path / "a/id", resumed=True)
    assert asked[-1] == {}


def test_wandb_gets_growing_steps(monkeypatch):
    logged = []

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            logged.append("finished")

    class FakeWandb:
        Error = RuntimeError

        @staticmethod
        def init(**arguments):
            assert arguments["project"] == "mine"
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb)
    record(wandb_log("mine", TagChoices(), name="run"))
    assert logged[-1] == "finished"
    steps = [step for step, _ in logged[:-1]]
    assert steps == sorted(steps)
    log = wandb_log("mine", TagChoices(), name="run")
    log.wandb.log({"mine": 1.0}, 3)  # before the log has written iterations 1 to 4
    log.wandb.log({"later": 2.0}, step=9)
    record(log)
    assert log.wandb.Error is RuntimeError and log.tensorboard is None
    logged.pop()
    assert (3, {"mine": 1.0}) in logged and logged[-1] == (9, {"later": 2.0})
    steps = [step for step, _ in logged[logged.index("finished") + 1 :]]
    assert steps == sorted(steps)
    assert (2, {"lm loss": 2.0}) in logged


WANDB_RUN = """
import sys
from megatron.training.log.records import Speed, StepRecord
from megatron.training.log.tensorboard import TagChoices, wandb_log

log = wandb_log("mine", TagChoices(), name="a run", save_dir=sys.argv[1], config={"lr": "0.1"})
log.steps([StepRecord(n, {"lm loss": n + 0.25}, learning_rate=0.1) for n in (1, 2)], Speed(0.5))
log.close()
"""


@pytest.mark.slow
def test_wandb_without_a_network(tmp_path):
    """Its offline mode keeps the values in a file of the run's folder."""
    pytest.importorskip("wandb")
    offline = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run([python(), "-c", WANDB_RUN, str(tmp_path)], env=offline, check=True)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for text in (b"a run", b"lm loss", b"1.25", b"2.25", b"learning-rate"):
        assert text in content, text
    assert b"vs samples" not in content
