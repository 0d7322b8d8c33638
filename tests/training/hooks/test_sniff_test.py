"""--gpu-sniff-test-interval: every rank is measured, and ranks that differ are named."""

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks

from megatron.training.hooks import sniff_test
from megatron.training.hooks.sniff_test import SniffTest, sniff_report


def test_ranks_more_than_one_deviation_from_the_mean_are_named() -> None:
    rates = [[100.0, 10.0], [100.0, 11.0], [100.0, 12.0], [60.0, 11.0]]
    products, exchange = sniff_report(rates)
    assert products == ("sniff test of matrix products: mean 90 TFLOP/s, deviation 19.2%; outside it: rank 3 (-33.3%)")
    assert exchange.endswith("rank 0 (-9.1%), rank 2 (+9.1%)")
    (equal,) = sniff_report([[5.0], [5.0]])
    (two,) = sniff_report([[5.0], [7.0]])
    assert "rank" not in equal and "rank" not in two


def lines_of_a_rank() -> list[str]:
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sniff_test, "print", lambda line, **more: printed.append(line), raising=False)
        hook = SniffTest(2, dist.group.WORLD, torch.device("cpu"))
        for iteration in range(1, 5):
            hook.after_step(iteration)
    return printed


def test_all_ranks_are_measured_at_the_interval_and_the_first_reports() -> None:
    first, second = run_on_ranks(lines_of_a_rank, 2)
    assert not second and len(first) == 6
    for iteration, three in ((2, first[:3]), (4, first[3:])):
        kinds = ("matrix products", "all-to-all", "send and receive")
        assert [line.split(": mean")[0] for line in three] == [
            f"iteration {iteration}: sniff test of {kind}" for kind in kinds
        ]


def test_one_process_measures_its_products(capsys: pytest.CaptureFixture[str]) -> None:
    SniffTest(1, None, torch.device("cpu")).after_step(3)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("iteration 3: sniff test of matrix products: mean ")
