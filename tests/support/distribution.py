"""Distributes tests over the workers of xdist: a file runs in one worker, so a module's fixtures are set up once.

Some slow files are split where tests share no fixture. The files that took longest start first, so that no worker has
one of them left when the others have nothing. After tests have changed much, record how long they take:

    PYTEST_ADDOPTS=--junitxml=/tmp/tests.xml make test && python tests/support/distribution.py /tmp/tests.xml
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_RECORD = Path(__file__).parents[1] / "data" / "seconds_of_files.json"
_SECONDS: dict[str, float] = json.loads(_RECORD.read_text())
"""What the tests of a file took together, on one core, if it was half a second or more."""
_LEAST = 0.5

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


def scope_of(nodeid: str) -> str:
    """Returns the scope of a test. Tests with the same scope run in one worker, one after the other."""
    cell = _CELL.match(nodeid)
    if cell:
        return f"{cell[1]}::{cell[2]}"
    return nodeid if nodeid.startswith(_ALONE) else nodeid.partition("::")[0]


def place_of(nodeid: str) -> float:
    """Returns the rank of a test in the order of a run."""
    return -_SECONDS.get(nodeid.partition("::")[0], 0.0)


def is_quick(nodeid: str) -> bool:
    """Tells whether the tests of the file took less than half a second together, or are not recorded."""
    return nodeid.partition("::")[0] not in _SECONDS


def make_scheduler(config: Any, log: Any) -> Any:
    """Returns an xdist scheduler that distributes tests by `scope_of`, in the order in which they were collected."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduler(config, log)


def record(report: Path) -> None:
    """Writes the durations of a JUnit report."""
    seconds = Counter[str]()
    for test in ElementTree.parse(report).getroot().iter("testcase"):
        seconds[test.attrib["classname"].replace(".", "/") + ".py"] += float(test.attrib["time"])
    kept = {file: round(taken, 1) for file, taken in sorted(seconds.items()) if taken >= _LEAST}
    _RECORD.write_text(json.dumps(kept, indent=0) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
