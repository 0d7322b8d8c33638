"""Command lines for tests of flags."""

import json
import math
from pathlib import Path

import pretrain_bert
import pretrain_t5
from megatron.core.declarations.config_fields import describe_problem, value_text
from megatron.core.exceptions import UserError
from megatron.training.arguments import configure
from megatron.training.config.flag_table import Flag, spelling_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
"""The flags that a run needs at least."""


def configured(
    flags: str = "",
    *,
    base: str = SMALL,
    ranks: int = 1,
    has_cuda: bool = False,
    of_host: int | None = None,
) -> PretrainConfig:
    """Returns the config of a command line for a given number of ranks, with or without CUDA."""
    environment = LaunchEnvironment(ranks, has_cuda, ranks_of_host=of_host)
    return configure(f"{base} {flags}".split(), launch_environment=environment)


def problems_of(flags: str = "", *, base: str = SMALL, ranks: int = 1) -> list[str]:
    """Returns the errors that a command line gives; empty if it is valid."""
    try:
        configured(flags, base=base, ranks=ranks)
    except ConfigurationError as error:
        assert isinstance(error, UserError)
        return error.problems
    return []


def problems_of_config(config_class: type, **values: object) -> list[str]:
    """Returns the errors that `validate()` of a config dataclass gives for these values."""
    config = config_class(**values)
    return [describe_problem(problem, config, spelling_of) for problem in config.validate()]


def without(flag: str) -> str:
    """Returns SMALL without one flag and its values."""
    words = SMALL.split()
    at = words.index(flag)
    end = at + 1
    while end < len(words) and not words[end].startswith("--"):
        end += 1
    return " ".join(words[:at] + words[end:])


def words_of(flag: Flag) -> list[str]:
    """Returns words that the flag accepts and that are not its default."""
    if flag.nargs == 0:
        return []
    count = flag.nargs if isinstance(flag.nargs, int) else 1
    default = value_text(flag.default)
    tried = [choice for choice in flag.choices or () if choice != default] or [
        "3",
        "1,2",
        "SIGUSR1",
        "x",
        "1:2",
        "1:2 3:4",
    ]
    for word in tried:
        try:
            flag.parse(word)
        except ValueError:
            continue
        return [word] * count
    raise AssertionError(f"no value for {flag.spelling}")


def megatron_lm_commands(name: str = "megatron_lm_commands") -> list[dict[str, str]]:
    """Returns the commands of Megatron-LM's examples, each as `source`, `entry` (its script) and `command`;
    with the name `published_commands` those that others published for releases 0.11 to 0.19."""
    file = Path(__file__).parents[1] / f"data/flags/{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


ENTRY_DEFAULTS: dict[str, dict[str, str]] = {
    "pretrain_bert.py": pretrain_bert.DEFAULTS,
    "pretrain_t5.py": pretrain_t5.DEFAULTS,
}
"""What the command line means by default in an entry script, by its name."""


def smallest_world(argv: list[str]) -> int:
    """Returns the smallest number of ranks that the parallel sizes of a command allow."""

    def size(flag: str, default: int = 1) -> int:
        return int(argv[argv.index(flag) + 1]) if flag in argv else default

    tensor, pipeline = size("--tensor-model-parallel-size"), size("--pipeline-model-parallel-size")
    dense = tensor * pipeline * size("--context-parallel-size")
    expert = size("--expert-tensor-parallel-size", tensor) * size("--expert-model-parallel-size") * pipeline
    return math.lcm(dense, expert) * size("--num-distributed-optimizer-instances")
