"""How tests are shared between the workers of xdist: by file, so that a module's fixtures are set up once.

Files whose tests take minutes together are cut where no fixture is shared, and what takes longest begins first.
"""

import re
from typing import Any

import pytest

_ALONE = ("tests/docs/test_commands.py", "tests/parity/test_mutations.py::test_a_planted_bug_is_caught")
"""Each of these tests by itself."""

_CELL = re.compile(r"(tests/parity/test_layouts\.py).*\[([^/\]]*)/")
"""Cells of the parity law by model: these share the results of one process."""

_FIRST = (
    "tests/docs/test_commands.py::test_quickstart",
    "tests/docs",
    "tests/parity",
    "tests/training",
    "tests/examples",
)
"""What takes longest, in this order."""


def scope_of(nodeid: str) -> str:
    """Tests with the same scope run in one worker, one after the other."""
    cell = _CELL.match(nodeid)
    if cell:
        return f"{cell[1]}::{cell[2]}"
    return nodeid if nodeid.startswith(_ALONE) else nodeid.partition("::")[0]


def place_of(nodeid: str) -> int:
    """Where a test stands in the order of a run."""
    return next((place for place, start in enumerate(_FIRST) if nodeid.startswith(start)), len(_FIRST))


def make_scheduler(config: Any, log: Any) -> Any:
    """The scheduler of xdist that shares tests by `scope_of`, in the order in which they were collected."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduler(config, log)


_STARTS_PROCESSES = frozenset(
    (
        "Pool",
        "commands",
        "launch",
        "multiprocessing",
        "python",
        "run_on_ranks",
        "subprocess",
        "train_all_on_ranks",
        "train_on_ranks",
    )
)
_NOT_QUICK = (
    "tests/core/dist_checkpointing/test_damage.py",
    "tests/core/dist_checkpointing/test_interrupted_saves.py",
    "tests/core/pipeline_parallel/test_orders.py",
    "tests/parity",
    "tests/training/config/test_resolution.py",
    "tests/training/conversion/test_against_transformers.py",
    "tests/training/tokenizer/test_byte_level.py",
    "tests/training/tokenizer/test_word_scanners.py",
)


def is_quick(item: pytest.Item) -> bool:
    """True for tests of modules that start no processes and do not take seconds."""
    assert isinstance(item, pytest.Function)
    return not (_STARTS_PROCESSES & vars(item.module).keys() or item.nodeid.startswith(_NOT_QUICK))
