"""Distributes tests over the workers of xdist: a file runs in one worker, so a module's fixtures are set up once.

Some slow files are split where tests share no fixture. The slowest tests start first.
"""

import re
from typing import Any

import pytest

_ALONE = (
    "tests/core/ops/test_kernels_triton.py",
    "tests/docs/test_commands.py",
    "tests/gpu/test_attention_on_gpu.py",
    "tests/gpu/test_fp8_on_gpu.py",
    "tests/scripts/test_scripts.py",
    "tests/parity/test_mutations.py::test_a_planted_bug_is_caught",
)
"""Each of these tests is a unit of its own."""

_CELL = re.compile(r"(tests/parity/test_layouts\.py).*\[([^/\]]*)/")
"""Parity cells, grouped by model: cells of one model share the reference's results."""

_FIRST = (
    "tests/docs/test_commands.py::test_quickstart",
    "tests/docs",
    "tests/scripts",
    "tests/parity",
    "tests/training",
    "tests/examples",
    "tests/benchmarks",
    "tests/tools",
    "tests/support",
    "tests/test_import_hygiene.py",
)
"""Tests that start first, in this order. Files that take longest come before the others, so that no worker has to do
one of them while the other worker has nothing left."""


def scope_of(nodeid: str) -> str:
    """Returns the scope of a test. Tests with the same scope run in one worker, one after the other."""
    cell = _CELL.match(nodeid)
    if cell:
        return f"{cell[1]}::{cell[2]}"
    return nodeid if nodeid.startswith(_ALONE) else nodeid.partition("::")[0]


def place_of(nodeid: str) -> int:
    """Returns the rank of a test in the order of a run."""
    return next((place for place, start in enumerate(_FIRST) if nodeid.startswith(start)), len(_FIRST))


def make_scheduler(config: Any, log: Any) -> Any:
    """Returns an xdist scheduler that distributes tests by `scope_of`, in the order in which they were collected."""
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
    "tests/core/ops/fp8",
    "tests/core/pipeline_parallel/test_orders.py",
    "tests/parity",
    "tests/benchmarks",
    "tests/tools",
    "tests/training/config/test_resolution.py",
    "tests/conversion/test_against_transformers.py",
    "tests/conversion/test_family_choice.py",
    "tests/training/hooks/test_routing_trace.py",
    "tests/diagnosis/layout_check/test_run_comparison.py",
    "tests/training/log/test_plot.py",
    "tests/training/setup/test_model.py",
    "tests/diagnosis/test_replay.py",
    "tests/data/tokenizer/test_bert_wordpiece.py",
    "tests/data/tokenizer/test_byte_level.py",
    "tests/data/tokenizer/test_huggingface.py",
    "tests/data/tokenizer/test_word_scanners.py",
)
_KERNELS = re.compile(r"tests/core/.*_triton\.py::")
"""Tests of Triton kernels: its interpreter is slow."""


def is_quick(item: pytest.Item) -> bool:
    """Tells whether the test's module starts no processes and takes less than a second or so."""
    assert isinstance(item, pytest.Function)
    return not (_STARTS_PROCESSES & vars(item.module).keys() or takes_seconds(item.nodeid))


def takes_seconds(nodeid: str) -> bool:
    """Tells whether the test is in a file whose tests take seconds together."""
    return nodeid.startswith(_NOT_QUICK) or _KERNELS.match(nodeid) is not None
