"""Two GPUs share the experts of a layer: every way to dispatch tokens gives the result and gradients of alltoall.

`torchrun --nproc_per_node 2 tests/gpu/test_expert_dispatch_on_gpus.py FOLDER` runs without GPUs too, over gloo.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.gpus import two_ranks
from torch import Tensor, nn

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.parameters import name_parameters
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.rendezvous import local_device

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    two_ranks,
]
ALLGATHER: dict[str, Any] = {"moe_token_dispatcher_type": "allgather"}
FLEX: dict[str, Any] = {"moe_token_dispatcher_type": "flex"}
OWN, PEERS = {"moe_local_token_overlap": True}, {"moe_dispatcher_transport": "symmetric-memory"}
WAYS: dict[str, dict[str, Any]] = {
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "allgather": ALLGATHER,
    "allgather, own tokens apart": {**ALLGATHER, **OWN},
    "allgather, own tokens apart, symmetric memory": {**ALLGATHER, **OWN, **PEERS},
    "flex": FLEX,
    "flex, own tokens apart": {**FLEX, **OWN},
    "flex, symmetric memory": {**FLEX, **PEERS},
    "flex, own tokens apart, symmetric memory": {**FLEX, **OWN, **PEERS},
}
STEPS, LENGTH, ROWS, HIDDEN = 7, 256, 2, 128


def on_this_rank(way: str, precision: dict[str, bool], device: str) -> list[Tensor]:
    """Returns outputs and gradients of inputs of each step, then the summed gradients of all parameters."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=16,
        moe_router_topk=4,
        moe_ffn_hidden_size=64,
        moe_aux_loss_coeff=0.01,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        **precision,
        **WAYS[way],
    )
    rank, model = dist.get_rank(), nn.Module()
    groups = ProcessGroupCollection.from_grid(RankGrid(2, expert=2), rank)
    model.mlp = MoELayer(config, MoESubmodules(experts=GroupedMLP), layer_number=1, pg_collection=groups)
    name_parameters(model)
    model.to(device)
    dtype = model.mlp.router.weight.dtype if precision.get("fp64") else model.mlp.experts.linear_fc1.weight.dtype
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            shared = 0 if parameter is model.mlp.router.weight else 10 * (rank + 1)
            generator = torch.Generator().manual_seed(number + shared)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs, weights = (torch.randn(LENGTH * ROWS, HIDDEN, generator=generator).to(device, dtype) for _ in range(2))
        inputs.requires_grad_()
        output, _ = model.mlp(inputs, LayerInputs(Tokens(LENGTH, ROWS)))
        (output * weights).sum().backward()
        found += [output.detach(), inputs.grad]
    return [tensor.double().cpu() for tensor in [*found, *(parameter.grad for parameter in model.parameters())]]


def main(answers: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_device())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    ways = [way for way in WAYS if device == "cuda" or "memory" not in way]
    errors: dict[str, dict[str, float]] = {}
    for name, precision in (("float64", {"fp64": True}), ("bfloat16", {"bf16": True, "params_dtype": torch.bfloat16})):
        expected = on_this_rank("alltoall", precision, device)
        for way in ways:
            found = on_this_rank(way, precision, device)
            pairs = list(zip(expected, found, strict=True))
            assert all(a.any() for a, _ in pairs)
            errors.setdefault(way, {})[name] = max(float((a - b).norm() / a.norm()) for a, b in pairs)
    (answers / f"{dist.get_rank()}").write_bytes(pickle.dumps(errors))
    if dist.get_rank() == 0:
        for way, by_precision in errors.items():
            print(f"{way:45}", *(f"{name} {error:.1e}" for name, error in by_precision.items()), flush=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    answers = tmp_path_factory.mktemp("answers")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launcher, __file__, str(answers)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [pickle.loads((answers / str(rank)).read_bytes()) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_equals_alltoall(way: str, ranks: list[dict[str, dict[str, float]]]) -> None:
    for errors in ranks:
        assert errors[way]["float64"] < 1e-12 and errors[way]["bfloat16"] < 0.01, errors[way]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
