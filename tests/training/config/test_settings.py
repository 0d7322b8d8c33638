"""The values of a run while they are completed, and their sources."""

import pytest

from megatron.core.exceptions import UserError
from megatron.training.config.command_line import read_command_line
from megatron.training.config.settings import LaunchEnvironment, Settings
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
