"""What docs/parallelism.md shows is what the code gives: grids, chunks, schedules.

`PYTHONPATH=. python tests/docs/test_parallelism.py` writes the page's generated parts anew.
"""

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable
from pathlib import Path

from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.simulator import Costs, simulate
from megatron.core.pipeline_parallel.stages import Pipeline
from megatron.core.tokens import SequencePart

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "parallelism.md"


def output_of(command: str) -> str:
    """What a tool of tools/ prints."""
    path, *words = command.split()
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tool.main(words)
    return printed.getvalue()


def chunks(ranks: int) -> str:
    """Which rank holds which chunk of a sequence, and the work of each under a causal mask."""
    holder = {chunk: rank for rank in range(ranks) for chunk in SequencePart(rank, ranks).chunks()}
    cells = [f"rank {holder[chunk]}" for chunk in range(2 * ranks)]
    work = [f"{chunk + 0.5:g}" for chunk in range(2 * ranks)]
    wide = max(map(len, cells)) + 2
    lines = [
        "chunk of the sequence  " + "".join(f"{chunk:^{wide}}" for chunk in range(2 * ranks)),
        "is held by             " + "".join(f"{cell:^{wide}}" for cell in cells),
        "keys that it sees      " + "".join(f"{part:^{wide}}" for part in work) + " chunks",
    ]
    total = {rank: sum(chunk + 0.5 for chunk, held in holder.items() if held == rank) for rank in range(ranks)}
    assert len(set(total.values())) == 1
    return "\n".join(line.rstrip() for line in lines) + f"\n\nevery rank: {total[0]:g} chunks of keys\n"


def schedules() -> str:
    """Bubble and peak of every schedule, as rows of a table."""
    rows = []
    for name, chunks_a_rank in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2)):
        schedule = Schedule(name, Pipeline(4, chunks_a_rank, name == "zb-v"), 8)
        each = 1.0 / chunks_a_rank
        timeline = simulate(schedule, Costs(each, each, each))
        peak = max(timeline.peak_activations(rank) for rank in range(4))
        shown = f"`{name}`" + (f", {chunks_a_rank} chunks a rank" if name == "interleaved" else "")
        rows.append(f"| {shown} | {timeline.bubble:.1%} | {peak:g} |\n")
    return "".join(rows)


PARTS: dict[str, tuple[str, Callable[[re.Match[str]], str]]] = {
    "outputs": (
        r"<!-- output of: (?P<command>[^\n]*) -->\n```\n(?P<body>.*?)```\n",
        lambda found: output_of(found["command"]),
    ),
    "chunks": (
        r"<!-- chunks of (?P<ranks>\d+) context parallel ranks -->\n```\n(?P<body>.*?)```\n",
        lambda found: chunks(int(found["ranks"])),
    ),
    "schedules": (r"<!-- schedules -->\n(?P<body>.*?)<!-- end -->\n", lambda found: schedules()),
}
"""Generated parts: a pattern, and what its body should be."""


def test_generated_parts_are_what_the_code_gives():
    page = PAGE.read_text()
    count = 0
    for pattern, make in PARTS.values():
        for found in re.finditer(pattern, page, flags=re.S):
            assert found["body"] == make(found), found[0].splitlines()[0]
            count += 1
    assert count == 3


def write() -> None:
    page = PAGE.read_text()
    for pattern, make in PARTS.values():

        def filled(found: re.Match[str], make: Callable[[re.Match[str]], str] = make) -> str:
            start, end = found.start("body") - found.start(), found.end("body") - found.start()
            return found[0][:start] + make(found) + found[0][end:]

        page = re.sub(pattern, filled, page, flags=re.S)
    PAGE.write_text(page)


if __name__ == "__main__":
    write()
