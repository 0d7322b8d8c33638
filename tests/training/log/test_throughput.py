"""The clock and the rates."""

from megatron.training.log.throughput import StepClock, speed


def test_clock_leaves_pauses_out():
    time = [100.0]
    clock = StepClock(lambda: time[0])
    time[0] = 103.0
    assert clock.seconds() == 3.0
    with clock.paused():
        time[0] = 110.0
        assert clock.seconds() == 3.0
    time[0] = 111.0
    assert clock.seconds() == 4.0
    with clock.paused():
        time[0] = 120.0
        clock.restart()
        time[0] = 130.0
    time[0] = 132.0
    assert clock.seconds() == 2.0


def test_rates():
    rates = speed(2.0, 4, tokens=1000, flops=8e15, world_size=2, peak_tflops=4000.0)
    assert rates.seconds_per_iteration == 0.5
    assert rates.tokens_per_second == 500.0
    assert rates.tflops_per_device == 2000.0
    assert rates.mfu == 0.5
    unknown = speed(2.0, 4, flops=8e15)
    assert (unknown.mfu, unknown.tokens_per_second, unknown.tflops_per_device) == (None, None, 4000.0)
    assert speed(0.0, 0, tokens=1, flops=1.0).tokens_per_second is None
