"""The probe of gradients, and checks of results with injected errors."""

import pytest
from support.runs import TINY, train
from torch import nn

from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.setup.watching import build_probe


def config_of(flags: str, ranks: int = 1) -> PretrainConfig:
    words = f"{TINY} --eval-iters 1 --mock-data {flags}".split()
    return configure(words, launch_environment=LaunchEnvironment(ranks, False))


def test_no_probe_without_an_embedding_or_without_the_check() -> None:
    assert build_probe(config_of("--train-iters 9"), [nn.Linear(2, 2)]) is None
    assert build_probe(config_of("--train-iters 9 --no-check-for-nan-in-loss-and-grad"), [nn.Linear(2, 2)]) is None


@pytest.mark.parametrize("fp8", ["", "--bf16 --fp8-format hybrid --fp8-recipe delayed"])
def test_an_injected_error_is_found_and_changes_nothing(fp8: str, capfd: pytest.CaptureFixture[str]) -> None:
    flags = f"--mock-data --train-iters 2 --eval-iters 0 {fp8}"
    plain = train(flags).losses
    assert train(f"{flags} --error-injection-rate 3").losses == plain
    assert "lm loss is rejected, injected as transient_error" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match=r"injected as persistent_error .* computed again: the same again"):
        train(f"{flags} --error-injection-rate 1 --error-injection-type persistent_error")
