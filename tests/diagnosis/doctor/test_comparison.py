"""What differs between ranks is named with its value, ranks and hosts."""

from megatron.diagnosis.doctor.comparison import (
    RankReport,
    differences,
    shared_findings,
    slow_links,
    slow_ranks,
    wrong_clocks,
)
from megatron.diagnosis.doctor.findings import Section


def report(host: str, torch: str = "2.11", free: str = "9 GiB", warning: str = "") -> RankReport:
    section = Section("software")
    section.add("torch", torch, "fault")
    section.add("free space", free)
    if warning:
        section.warn(warning)
    return RankReport(host, (section,))


ALIKE = [report("a"), report("a"), report("b"), report("b")]


def test_ranks_that_are_alike_have_no_differences() -> None:
    assert not [
        *differences(ALIKE),
        *wrong_clocks([5.0, 5.1, 4.9, 6.0], ALIKE),
        *slow_ranks("x", "y", [9, 9, 8, 9], ALIKE),
    ]


def test_a_fact_that_differs_is_named_with_its_rarest_value_first() -> None:
    (found,) = differences([*ALIKE[:3], report("b", torch="2.13", free="1 GiB")])
    assert found.level == "fault"
    assert found.text == "torch is 2.13 on rank 3 (b) and 2.11 on ranks 0, 1 (a), rank 2 (b): make all ranks alike"


def test_a_fact_that_a_rank_lacks_differs() -> None:
    (found,) = differences([*ALIKE[:3], RankReport("b", ())])
    assert "torch is not set on rank 3 (b)" in found.text


def test_the_same_finding_comes_once_with_its_ranks() -> None:
    (found,) = shared_findings([report("a", warning="bad"), report("a"), report("b", warning="bad")])
    assert found.text == "rank 0 (a), rank 2 (b): bad"
    (everywhere,) = shared_findings([report("a", warning="bad"), report("b", warning="bad")])
    assert everywhere.text == "all ranks: bad"
    (alone,) = shared_findings([report("a", warning="bad")])
    assert alone.text == "bad"


def test_a_wrong_clock_is_that_of_a_host() -> None:
    (found,) = wrong_clocks([100.0, 100.1, 40.0, 40.2], [*ALIKE[:2], *ALIKE[2:]])
    assert found.text.startswith("the clock of a is 59.9 s ahead of the others")
    (found,) = wrong_clocks([100.0, 100.1, 100.0, 70.2], [*ALIKE[:3], report("c")])
    assert found.text.startswith("the clock of c is 29.8 s behind the others")


def test_a_slow_rank_is_named_even_among_two() -> None:
    (found,) = slow_ranks("products", "TFLOP/s", [400.0, 670.0], ALIKE[:2])
    assert found.text.startswith("rank 0 (a) is slow: products 400 TFLOP/s, the median is 670")
    assert not list(slow_ranks("products", "TFLOP/s", [None, None], ALIKE[:2]))


def test_a_slow_link_is_slow_among_its_kind() -> None:
    kinds = {(0, 1): "within a host", (2, 3): "within a host", (1, 2): "between hosts", (3, 0): "between hosts"}
    rates = {(0, 1): 300e9, (2, 3): 310e9, (1, 2): 12e9, (3, 0): 45e9}
    (found,) = slow_links(rates, kinds, ALIKE)
    assert found.text == (
        "the link between rank 1 (a) and rank 2 (b) is slow: 12 GB/s each way, the median between hosts is 45"
    )
