"""Records of communication: bytes that a rank sends, and which lists get an entry."""

import pytest
import torch

from megatron.core.communication.traffic import Traffic, record_traffic, recorded


@pytest.mark.parametrize(
    ("operation", "sent"),
    [
        ("all_reduce", 150.0),
        ("all_gather", 75.0),
        ("reduce_scatter", 75.0),
        ("all_to_all", 75.0),
        ("broadcast", 25.0),
        ("send", 100.0),
        ("receive", 0.0),
    ],
)
def test_bytes_that_a_rank_of_four_sends_of_a_hundred(operation: str, sent: float) -> None:
    assert Traffic(operation, torch.float32, 100, (0, 1, 2, 3)).sent_bytes == sent


def test_rows_of_an_all_to_all_that_stay_here_are_not_sent() -> None:
    rows = torch.zeros(10, 2, dtype=torch.bfloat16)
    with recorded() as log:
        record_traffic("all_to_all", rows, lambda: (0, 1), kept_rows=3)
        record_traffic("all_to_all", rows[:0], lambda: (0, 1), kept_rows=0)
    assert [entry.sent_bytes for entry in log] == [28.0, 0.0]


def test_every_open_record_gets_an_entry_and_a_closed_one_none() -> None:
    tensor = torch.zeros(3, 2, dtype=torch.bfloat16)
    with recorded() as outer:
        with recorded() as inner:
            record_traffic("all_gather", tensor, lambda: (0, 1))
        record_traffic("send", tensor, lambda: (1, 0))
    record_traffic("broadcast", tensor, lambda: pytest.fail("nobody records"))
    gather, send = Traffic("all_gather", torch.bfloat16, 12, (0, 1)), Traffic("send", torch.bfloat16, 12, (1, 0))
    assert inner == [gather] and outer == [gather, send]
