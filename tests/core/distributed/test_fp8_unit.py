"""Units whose weights exist only in fp8: whole weights can be read and loaded, and a weight without values says why."""

import pytest
import torch
from support.processes import run_on_ranks
from support.runs import train

from megatron.core.exceptions import UserError
from megatron.core.ops.fp8.linear import QuantizedWeights
from megatron.core.optimizer.external import ExternalOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.training.trainer import Trainer

FLAGS = (
    "--mock-data --eval-interval 3 --eval-iters 1 --hidden-size 32 --ffn-hidden-size 64 --fp8-format hybrid --bf16 "
    "--fp8-recipe tensorwise --use-distributed-optimizer"
)


def whole_model(flags: str) -> tuple[dict[str, torch.Tensor], ...]:
    """Returns the state dict of a trained model, after it was loaded with negated weights, and the fp8
    weights after another update."""
    found: list[Trainer] = []
    train(f"{flags} --train-iters 2", before=found.append)
    (chunk,) = found[0].model
    before = {name: value.clone() for name, value in chunk.state_dict().items() if isinstance(value, torch.Tensor)}
    chunk.load_state_dict({name: -value for name, value in before.items()}, strict=False)
    after = {name: value.clone() for name, value in chunk.state_dict().items() if isinstance(value, torch.Tensor)}
    found[0].optimizer.step_on_device()  # which starts from the main weights
    layers = [layer for layer in chunk.modules() if isinstance(layer, QuantizedWeights)]
    rows = [layer.weight_rows(layer.own_weight).values.view(torch.uint8).clone() for layer in layers]
    return before, after, {str(number): codes for number, codes in enumerate(rows)}


@pytest.mark.slow
def test_whole_weights_can_be_read_and_loaded() -> None:
    for plain, gathered in zip(
        run_on_ranks(whole_model, 2, FLAGS),
        run_on_ranks(whole_model, 2, f"{FLAGS} --fp8-param-gather"),
        strict=True,
    ):
        for exact, ours in zip(plain, gathered, strict=True):
            assert exact.keys() == ours.keys() and all(torch.equal(exact[name], ours[name]) for name in exact)


def test_a_weight_without_values_says_why() -> None:
    found: list[Trainer] = []
    train(f"{FLAGS} --fp8-param-gather --train-iters 1", before=found.append)
    (chunk,) = found[0].model
    (weight,) = (p for name, p in chunk.named_parameters() if name.endswith("layers.0.mlp.linear_fc1.weight"))
    assert weight.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match=r"mlp\.linear_fc1\.weight is read .* with --fp8-param-gather the weight"):
        weight.sum()
    with pytest.raises(UserError, match="the script's own SGD updates weights that --fp8-param-gather keeps only in"):
        ExternalOptimizer(OptimizerConfig(), torch.optim.SGD(chunk.parameters(), lr=0.1), [chunk])
