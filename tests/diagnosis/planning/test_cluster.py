"""Times of communication from the rates of links."""

import dataclasses

import pytest

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.cluster import Cluster, link_of
from megatron.diagnosis.planning.figures import Figure
from megatron.diagnosis.planning.gpus import Gpu, gpu_named

PLAIN = dataclasses.replace(
    gpu_named("h200"), collectives=Figure(100e9, "test"), nic=Figure(50e9, "port"), pcie=Figure(10e9, "pcie")
)


def cluster(gpu: Gpu = PLAIN, gpus: int = 32, node: int = 8, domain: int = 8, link: float | None = None) -> Cluster:
    return Cluster(gpu, gpus, node, domain, link)


@pytest.mark.parametrize(
    ("machines", "ranks", "seconds"),
    [
        (cluster(), range(8), 100e9 * 7 / 8 / 100e9),
        (cluster(), range(1), 0.0),
        # Two nodes: each of 8 GPUs sends its eighth of one half to the other node, at 80% of its port.
        (cluster(), range(16), 100e9 * 7 / 8 / 100e9),
        (cluster(), range(0, 32, 8), 100e9 * 3 / 4 / 40e9),
        (cluster(link=5e9), range(16), 100e9 / 2 / 8 / 4e9),
        (cluster(domain=2), range(8), 100e9 * 7 / 8 / 10e9),
        (cluster(node=4, domain=32), range(32), 100e9 * 31 / 32 / 100e9),
    ],
)
def test_gathering(machines: Cluster, ranks: range, seconds: float) -> None:
    assert machines.gather_seconds(100e9, ranks).value == pytest.approx(seconds, rel=1e-3)


def test_an_exchange_of_all_with_all() -> None:
    # Of 15 other ranks 8 are on the other node.
    assert cluster().exchange_seconds(15e9, range(16)).value == pytest.approx(8e9 / 40e9, rel=1e-3)
    assert cluster().exchange_seconds(7e9, range(8)).value == pytest.approx(7e9 / 100e9, rel=1e-3)


def test_messages() -> None:
    assert cluster().message_seconds(1e9, 0, 1).value == pytest.approx(0.01, rel=0.01)
    assert cluster().message_seconds(1e9, 7, 8).value == pytest.approx(1 / 40, rel=0.01)


def test_an_unknown_rate_is_refused() -> None:
    bare = dataclasses.replace(PLAIN, nic=None, collectives=None)
    with pytest.raises(UserError, match="has no known rate between nodes: give --link, such as --link 400Gb"):
        cluster(bare).gather_seconds(1.0, (0, 8))
    with pytest.raises(UserError, match="the record of h200 has no rate within a node: add the key collectives"):
        cluster(bare).gather_seconds(1.0, (0, 1))


@pytest.mark.parametrize(
    ("text", "rate"), [("400Gb", 50e9), ("400Gbit/s", 50e9), ("50GB", 50e9), ("0.8Tb/s", 100e9), ("100 Gbps", 12.5e9)]
)
def test_links(text: str, rate: float) -> None:
    assert link_of(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "400", "fast", "0Gb", "400gb", "-1Gb"])
def test_a_wrong_link_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"^--link {text}: expected the rate of a GPU to other nodes, such as 400Gb"):
        link_of(text)
