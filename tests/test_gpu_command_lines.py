"""Command lines of the tests that need a GPU are valid, and the run that they watch works, as far as a CPU can tell."""

import pytest
from support.command_lines import configured
from support.each import for_each
from support.gpu_runs import RUNS, train_watched
from support.user_scripts import FLAGS

import pretrain_bert
import pretrain_t5
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment

DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"
TINY = "--num-layers 1 --hidden-size 32 --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --train-iters 6"


@for_each(RUNS)
def test_the_command_line_is_accepted(name: str) -> None:
    configured(DATA, base=" ".join(word for word in RUNS[name] if word not in ("--split", "100,0,0")), has_cuda=True)


def test_the_watched_run_takes_its_steps() -> None:
    words = [word for word in RUNS["watched float32"] if word not in ("--split", "100,0,0")]
    assert train_watched([*words, *f"{DATA} {TINY} --lr-warmup-iters 2".split()]) == 6


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("layout", ["", "--bf16", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
def test_the_command_line_of_users_scripts_is_accepted(kind: str, layout: str) -> None:
    defaults = {"gpt": {"model_family": "gpt"}, "bert": pretrain_bert.DEFAULTS, "t5": pretrain_t5.DEFAULTS}[kind]
    ranks = 2 if "parallel" in layout else 1
    words = f"{FLAGS[kind]} {layout}".split()
    assert configure(words, None, defaults, launch_environment=LaunchEnvironment(ranks, True)).training.train_iters == 2
