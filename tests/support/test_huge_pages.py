"""Forked processes share the huge pages of their server."""

from pathlib import Path

from support.huge_pages import collapse
from support.processes import run_on_ranks


def kibibytes_and_collapsed_pages() -> tuple[int, int]:
    values = Path("/proc/self/smaps_rollup").read_text().split()
    return int(values[values.index("AnonHugePages:") + 1]), collapse()


def test_a_rank_begins_in_huge_pages_where_the_system_has_them() -> None:
    ((kibibytes, pages),) = run_on_ranks(kibibytes_and_collapsed_pages, 1)
    assert (kibibytes > 0) == (pages > 0)
