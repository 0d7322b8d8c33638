"""--check-weight-hash-across-dp-replicas-interval compares at its interval, and says what differs."""

from typing import Any

import pytest

from megatron.core.distributed.replica_check import ReplicaDifference
from megatron.training.hooks import replicas
from megatron.training.hooks.replicas import ReplicaCheck


def test_replicas_are_compared_at_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    model: list[Any] = []
    compared: list[int] = []

    def differing_units(chunks: Any) -> list[ReplicaDifference]:
        assert chunks is model
        compared.append(1)
        return (
            [] if len(compared) < 3 else [ReplicaDifference("layers.0", (1,)), ReplicaDifference("output_layer", (0,))]
        )

    monkeypatch.setattr(replicas, "differing_units", differing_units)
    hook = ReplicaCheck(model, 2)
    for iteration in range(1, 6):
        hook.after_step(iteration)
    assert len(compared) == 2
    with pytest.raises(RuntimeError) as failure:
        hook.after_step(6)
    assert str(failure.value) == (
        "after iteration 6 the weights of layers.0 and of 1 more units differ between data parallel replicas: "
        "replica 1 from most others; the hardware of its rank may be broken"
    )
