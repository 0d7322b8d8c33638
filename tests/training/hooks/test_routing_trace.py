"""--moe-routing-trace-path: lines say what the routers chose; recomputed layers are noted once."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import train

from megatron.core.exceptions import UserError
from megatron.training.config.log import RecordsConfig
from megatron.training.hooks.routing_trace import RoutingTrace

FLAGS = (
    "--mock-data --train-iters 3 --eval-interval 1 --eval-iters 1 --seq-length 8 --num-experts 4 --moe-router-topk 2 "
    "--disable-bias-linear --init-method-std 0.5"
)


@pytest.mark.fast("")
@pytest.mark.parametrize(
    "more", ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
)
def test_a_line_for_each_router_and_micro_batch(tmp_path: Path, more: str) -> None:
    trace = (
        f"--moe-routing-trace-path {tmp_path} --moe-routing-trace-max-training-iters 2 "
        "--moe-routing-trace-dump-weights --moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states"
    )
    assert train(f"{FLAGS} {more} {trace}").losses == train(f"{FLAGS} {more}").losses
    lines = [json.loads(line) for line in (tmp_path / "rank_00000.jsonl").read_text().splitlines()]
    places = [(line["iteration"], line["micro_batch"], line["layer"]) for line in lines]
    assert places == [(i, m, layer) for i in (1, 2) for m in range(4) for layer in (1, 2)]
    weights = load_file(tmp_path / "weights_rank_00000.safetensors")
    assert set(weights) == {f"decoder.layers.{n}.mlp.router.weight" for n in (0, 1)}
    first = lines[0]  # before the first update: the weights are those of the file
    logits = torch.tensor(first["hidden_states"]) @ weights["decoder.layers.0.mlp.router.weight"].t()
    torch.testing.assert_close(logits, torch.tensor(first["logits"]), rtol=1e-4, atol=1e-5)
    chosen, experts = logits.topk(2)
    assert experts.sort().values.tolist() == torch.tensor(first["experts"]).sort().values.tolist()
    assert torch.tensor(first["weights"]).sum(1).allclose(torch.ones(8)) and chosen.shape == (8, 2)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = RecordsConfig(moe_routing_trace_path=str(tmp_path / "file" / "x"))
    with pytest.raises(UserError, match=r"--moe-routing-trace-path .*file/x: Not a directory"):
        RoutingTrace(flags, [], 0).on_start(0)
