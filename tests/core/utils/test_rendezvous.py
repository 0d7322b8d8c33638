"""The world that torchrun's environment describes."""

import gc
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.exceptions import UserError
from megatron.core.utils import rendezvous
from megatron.core.utils.activity import activity


def test_a_world_needs_all_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANK", "0")
    assert rendezvous.started_by_torchrun()
    for name in names:
        with monkeypatch.context() as patch:
            patch.delenv(name)
            assert not rendezvous.started_by_torchrun()
            if name != "WORLD_SIZE":  # one process, which needs no world
                assert not rendezvous.start_torch_distributed()


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "has RANK=0 but no WORLD_SIZE and no MASTER_ADDR and no MASTER_PORT; start .* unset RANK to"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE=2 but no RANK and no MASTER_ADDR and no MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "has RANK=0 and WORLD_SIZE=2 but no MASTER_ADDR and no MASTER_PORT; start"),
        ({**TORCHRUN, "RANK": "2"}, "RANK 2 .*: with WORLD_SIZE 2 ranks are 0 to 1"),
        ({**TORCHRUN, "RANK": "first"}, "RANK 'first' .*: expected a number"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT 'http' .*: expected a number"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT 99999 .*: ports are 1 to 65535"),
    ],
)
def test_variables_that_describe_no_world_are_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        rendezvous.start_torch_distributed()


def test_a_port_without_ranks_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets it so in a pod beside a service named "master"."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:80")
    assert not rendezvous.start_torch_distributed()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert rendezvous.local_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert rendezvous.local_device() == torch.device("cuda", 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(UserError, match="LOCAL_RANK 3 has no GPU"):
        rendezvous.local_device()
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert rendezvous.local_device() == torch.device("cuda", 0)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    monkeypatch.setenv("LOCAL_RANK", "a")
    with pytest.raises(UserError, match="LOCAL_RANK 'a'"):
        rendezvous.local_device()


def test_ranks_wait_for_each_other_while_they_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(rendezvous.dist, "init_process_group", lambda *_, **more: seen.extend(activity.waits.values()))
    assert rendezvous.start_torch_distributed(torch.device("cpu"), alone=True)
    assert [(call.operation, call.channel.ranks) for call in seen] == [("init_process_group", (0,))]
    assert not activity.waits


def test_a_second_run_of_a_process_reads_no_addresses_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store outlives both: ranks that connect to closed ports wait forever."""
    of_torchrun, stores = dist.HashStore(), []
    for name, value in {**TORCHRUN, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "connect_to_store", lambda *_: of_torchrun)
    monkeypatch.setattr(rendezvous.dist, "init_process_group", lambda *_, store, **more: stores.append(store))
    rendezvous.start_torch_distributed(torch.device("cpu"))
    stores[0].set("0", "address")
    rendezvous.start_torch_distributed(torch.device("cpu"))
    assert len(stores) == 2 and not stores[1].check(["0"])


def test_one_process_claims_a_key_while_the_store_lives() -> None:
    """Another thread may wait in the store meanwhile. Without a server each may claim it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [
        dist.PrefixStore("run", dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=20)))
        for _ in range(2)
    ]
    waits = threading.Thread(target=clients[1].get, args=("later",))
    waits.start()
    claims = [rendezvous.is_first_to_claim(client, "end", str(at)) for at, client in enumerate(clients)]
    server.set("run/later", "")
    waits.join()
    assert claims == [True, False]
    assert rendezvous.is_first_to_claim(clients[1], "other", "1")
    assert not rendezvous.is_first_to_claim(clients[0], "other", "0")
    del server
    gc.collect()
    assert all(rendezvous.is_first_to_claim(client, "last", str(at)) for at, client in enumerate(clients))
