"""The values of a run while they are completed, and their sources."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.training.config.command_line import read_command_line
from megatron.training.config.settings import LaunchEnvironment, Settings, batch_steps, ranks_of_host
from megatron.training.config.training import EvaluationConfig


def test_values_and_their_sources() -> None:
    settings = Settings(read_command_line(["--eval-iters", "3"]), LaunchEnvironment(4, False))
    assert settings.eval_iters == 3 and settings.is_given("eval_iters") and settings.world_size == 4
    assert not settings.is_given("eval_interval") and not settings.is_given("world_size")
    settings.set_derived("eval_iters", 5)
    assert settings.eval_iters == 5 and settings.provenance["eval_iters"] == "derived"
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = settings.no_such_field


def test_a_config_is_built_from_the_values_of_its_fields() -> None:
    settings = Settings(read_command_line(["--eval-iters", "3"]), LaunchEnvironment(1, False))
    assert settings.build(EvaluationConfig, skip_train=True) == EvaluationConfig(eval_iters=3, skip_train=True)


def test_the_environment_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    environment = LaunchEnvironment.of_this_process()
    assert (environment.world_size, environment.world_size_is_given, environment.looks_at_files) == (8, True, False)
    for word in ("many", "0", "-1", "100000000000"):
        monkeypatch.setenv("WORLD_SIZE", word)
        with pytest.raises(UserError, match=f"WORLD_SIZE {word}: expected the number of ranks"):
            LaunchEnvironment.of_this_process()


@pytest.mark.parametrize(
    ("words", "length", "sizes"),
    [("0:4 1K:8", 16, [4, 8]), (None, 16, None), ("0:4 1K", 16, None), ("0:4", None, None)],
)
def test_impossible_schedules_have_no_sizes(words: str | None, length: int | None, sizes: list[int] | None) -> None:
    settings: Any = SimpleNamespace(step_batch_size_schedule=words, seq_length=length)
    found = batch_steps(settings)
    assert (None if found is None else [size for _, size in found.steps]) == sizes


STEP = {"WORLD_SIZE": "12", "SLURM_NTASKS": "12", "SLURM_TASKS_PER_NODE": "8,4"}


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "x"}, None),
        ({"LOCAL_WORLD_SIZE": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "6"}, 6),
        (STEP, 8),
        ({**STEP, "SLURM_NODEID": "1"}, 4),
        ({**STEP, "SLURM_NODEID": "2"}, None),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "6(x2)"}, 6),
        # A dry run of another size within a job, and torchrun on each node.
        ({**STEP, "WORLD_SIZE": "64"}, None),
        ({**STEP, "WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "32"}, 32),
    ],
)
def test_ranks_of_a_host(variables: dict[str, str], ranks: int | None) -> None:
    assert ranks_of_host(variables) == ranks
