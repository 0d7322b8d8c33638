"""Tensor parallel products in pieces on two GPUs: both transports against whole products, while ranks are late.

`torchrun --nproc_per_node 2 tests/gpu/test_tensor_parallel_overlap_on_gpus.py FOLDER` runs the same on a CPU, without
symmetric memory.
"""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpus import need_room
from torch import Tensor, nn

from megatron.core.communication.piece_exchange import PieceExchange, open_exchange
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.groups.defaults import default_collection
from megatron.core.parameters import name_parameters
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils.rendezvous import local_device
from megatron.core.utils.torch_private import sleep_on_gpu
from megatron.facades import parallel_state

ROOT = Path(__file__).parents[2]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TRANSPORTS = ["symmetric-memory", "process-group"] if ON_GPU else ["process-group"]
TOLERANCE = {torch.float64: 1e-13, torch.bfloat16: 2e-2}
ITERATIONS = 400 if ON_GPU else 20
LONGEST_DELAY = 3_000_000
"""Clock cycles, 1.5 to 2 ms: as long as many exchanges."""


def sometimes_late(late: random.Random) -> None:
    """Keeps this rank's stream busy for a while, at random."""
    if ON_GPU and late.random() < 0.2:
        sleep_on_gpu(late.randrange(LONGEST_DELAY))


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Layers


def build(kind: type[nn.Module], sizes: tuple[int, int], dtype: torch.dtype, **settings: Any) -> Any:
    group = default_collection().tp
    more = {"input_is_parallel": True, "skip_bias_add": False} if kind is RowParallelLinear else {}
    formats = {"fp64": dtype is torch.float64, "bf16": dtype is torch.bfloat16}
    config = ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=True, **formats, **settings
    )
    layer = kind(*sizes, config=config, init_method=nn.init.normal_, bias=True, tp_group=group, **more).to(DEVICE)
    name_parameters(layer)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=100 * dist.get_rank() + seed, dtype=dtype))
    return layer


def results(layer: Any, tokens: int, dtype: torch.dtype, steps: int, late: random.Random | None) -> list[Tensor]:
    """Outputs and gradients of some steps; every other step has two forwards before its backwards."""
    found, rank, world = [], dist.get_rank(), dist.get_world_size()
    columns = isinstance(layer, ColumnParallelLinear)
    width = layer.input_size if columns else layer.input_size_per_partition
    waiting: list[tuple[Tensor, Tensor, int]] = []
    for step in range(steps):
        x = draw(tokens // world if columns else tokens, width, seed=1000 * rank + step, dtype=dtype).requires_grad_()
        if late is not None:
            sometimes_late(late)
        output = layer(x)[0]
        found.append(output.detach().clone())
        waiting.append((output, x, step))
        while waiting and step % 2:
            output, x, number = waiting.pop(0)
            gradient = draw(*output.shape, seed=7000 + 1000 * rank + number, dtype=dtype)
            if late is not None:
                sometimes_late(late)
            found.append(torch.autograd.grad(output, x, gradient, retain_graph=True)[0])
            found += torch.autograd.grad(output, list(layer.parameters()), gradient)
    return found


def layer_errors(transport: str) -> dict[Any, float]:
    """The largest difference from whole products, relative to the largest element."""
    errors, late = {}, random.Random(dist.get_rank())
    for dtype in TOLERANCE:
        for kind in (ColumnParallelLinear, RowParallelLinear):
            for tokens, sizes in ((64, (32, 48)), (2048, (512, 1024)), (256, (96, 64))):
                whole = results(build(kind, sizes, dtype), tokens, dtype, 4, None)
                for cuts in (False, True):
                    layer = build(
                        *(kind, sizes, dtype),
                        tp_comm_overlap=True,
                        tp_comm_overlap_transport=transport,
                        tp_comm_overlap_rs_dgrad=cuts,
                    )
                    assert "ProductsInPieces" in str(vars(layer))
                    found = results(layer, tokens, dtype, 4, late)
                    pairs = zip(found, whole, strict=True)
                    errors[transport, dtype, kind.__name__, tokens, cuts] = max(
                        ((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs
                    )
    return errors


# ---------------------------------------------------------------------------------------------------------------------
# Exchanges


def wrong_elements(transport: str) -> int:
    """Elements that did not arrive as they were sent, in many exchanges of random sizes, two open at once. Ranks are
    late before they send and before they read. The host never waits."""
    group = default_collection().tp
    world, rank = dist.get_world_size(), dist.get_rank()
    like, wrong = torch.empty(0, device=DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    late, sizes = random.Random(rank), random.Random(0)
    largest = 1 << (20 if ON_GPU else 10)
    pair: list[tuple[PieceExchange, int]] = []

    def value(source: int, number: int) -> float:
        return float(10 * number + source)

    for number in range(ITERATIONS):
        if number == 10 and ON_GPU:  # memory has been made, and communicators have started
            torch.cuda.set_sync_debug_mode("error")
        shape = (largest,) if number < 2 else (sizes.choice([1, 77, 4096, largest]),)
        exchange = open_exchange(group, shape, like, transport)  # type: ignore[arg-type]
        sometimes_late(late)
        own = torch.full(shape, value(rank, number), device=DEVICE)
        for distance in range(1, world):
            exchange.send(own, distance)
        exchange.keep(own)
        pair.append((exchange, number))
        if len(pair) == 2:
            for opened, its_number in pair:
                sometimes_late(late)
                slots = opened.receive_all()
                for source in range(world):
                    wrong += (slots[source] != value(source, its_number)).sum()
                opened.close()
            pair.clear()
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("default")
    return int(wrong)


def main(answers: Path) -> None:
    if ON_GPU:
        torch.cuda.set_device(local_device())
    world = int(os.environ["WORLD_SIZE"])
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    found = {transport: (layer_errors(transport), wrong_elements(transport)) for transport in TRANSPORTS}
    (answers / f"{dist.get_rank()}").write_bytes(pickle.dumps(found))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_are_what_whole_products_are(ranks: int, tmp_path: Path) -> None:
    need_room(ranks)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run([*launcher, __file__, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(ranks):
        found = pickle.loads((tmp_path / str(rank)).read_bytes())
        assert set(found) == {"symmetric-memory", "process-group"}
        for errors, wrong in found.values():
            assert not {case: error for case, error in errors.items() if not error < TOLERANCE[case[1]]}
            assert wrong == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("done")
