"""Which ranks have missed which collective."""

from megatron.training.launch.missed_calls import MissedCall, missed_calls, named_ranks, ranks_behind


def report(waits: list[list[object]], counts: list[list[object]]) -> dict[str, object]:
    return {"waits": waits, "counts": counts}


def test_a_rank_with_a_lower_number_has_missed_the_call() -> None:
    reports = {
        0: report([["w", [0, 1, 2, 3], 7, "all_reduce"]], [["w", [0, 1, 2, 3], 7]]),
        1: report([["t", [1, 3], 5, "all_gather"]], [["w", [0, 1, 2, 3], 7], ["t", [1, 3], 5]]),
        2: report([["w", [0, 1, 2, 3], 7, "all_reduce"]], [["w", [0, 1, 2, 3], 7]]),
        3: report([], [["w", [0, 1, 2, 3], 6], ["t", [1, 3], 4]]),
    }
    assert missed_calls(reports) == [
        MissedCall("all_reduce", 7, (0, 1, 2, 3), (0, 2), (3,)),
        MissedCall("all_gather", 5, (1, 3), (1,), (3,)),
    ]
    assert ranks_behind(reports) == [3]


def test_a_failed_rank_without_a_report_has_missed_it() -> None:
    reports = {0: report([["0>1", [0, 1], 2, "send"]], [["0>1", [0, 1], 2]])}
    assert missed_calls(reports, failed=1) == [MissedCall("send", 2, (0, 1), (0,), (1,))]
    assert missed_calls(reports) == [MissedCall("send", 2, (0, 1), (0,), ())]
    assert missed_calls({0: report([["device", [], 0, "the device"]], [])}) == []


def test_names_of_ranks() -> None:
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([0, 1, 3]) == "ranks 0, 1 and 3"
    assert named_ranks(range(64)) == "ranks 0, 1, 2, 3, ... (64 in all)"
