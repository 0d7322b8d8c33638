"""The three cheapest ways to take less memory."""

from typing import Any

from support.command_lines import configured

from megatron.core.exceptions import UserError
from megatron.diagnosis.memory.ways_out import WayOut, way_text, ways_out

FLAGS = "--hidden-size 256 --micro-batch-size 4 --bf16 --swiglu"


def peak_of(config: Any) -> int:
    """1,000 bytes, and less with some settings."""
    less = 300 * (config.training.micro_batch_size == 2)
    less += 200 * (config.transformer.recompute_granularity == "full")
    less += 250 * bool(config.optimizer.optimizer_cpu_offload)
    if config.transformer.loss_chunk_size is not None:
        raise UserError("impossible here")
    return 1000 - less


def test_the_cheapest_come_first() -> None:
    found = ways_out(configured(FLAGS), peak_of)
    assert [way.saved for way in found] == [300, 200, 250]
    assert found[0].flags == "--micro-batch-size 2" and found[0].price == 0.0
    prices = [way.price for way in found]
    assert prices == sorted(prices) and 0.2 < found[1].price < 1 / 3  # a forward again


def test_those_that_are_enough_come_first() -> None:
    assert [way.saved for way in ways_out(configured(FLAGS), peak_of, least=240)] == [300, 250, 200]


def test_used_flags_are_not_named() -> None:
    used = f"{FLAGS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert [way.saved for way in ways_out(configured(used), peak_of)] == [300, 250]


def test_in_words() -> None:
    way = WayOut("--micro-batch-size 2", 3 * 2**30, 0.0)
    assert way_text(way, str) == "--micro-batch-size 2: 3221225472 less, costs no more work"
    assert way_text(WayOut("--x", 5, 0.123), str) == "--x: 5 less, costs about 12.3% of the step"
