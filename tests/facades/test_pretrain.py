"""Arguments of `pretrain` that are refused or have no effect."""

import pytest
from support.runs import TINY

from megatron.core.exceptions import UserError
from megatron.facades import training
from megatron.facades.pretrain import non_loss_functions, pretrain
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.providers import NonLossFunctions


def config_of(flags: str) -> PretrainConfig:
    words = f"{TINY} --mock-data --train-iters 9 {flags}".split()
    return configure(words, launch_environment=LaunchEnvironment(1, False))


def test_pretrain_has_its_public_name() -> None:
    assert training.pretrain is pretrain


@pytest.mark.parametrize("name", ["store", "inprocess_call_wrapper"])
def test_what_is_not_supported_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"pretrain\({name}=...\): not yet"):
        pretrain(lambda counts: (), **{name: object()})


def test_a_function_without_its_writer_is_not_called(capsys: pytest.CaptureFixture[str]) -> None:
    without, board = config_of(""), config_of("--tensorboard-dir board")
    assert non_loss_functions(None, None, board) is None
    assert non_loss_functions(None, print, without) is None
    assert "process_non_loss_data_func is not called" in capsys.readouterr().out
    assert non_loss_functions(max, print, board) == NonLossFunctions(max, print)
    assert capsys.readouterr().out == ""
