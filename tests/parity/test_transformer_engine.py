"""Layouts of models that Transformer Engine computes (a stand-in, in float64): against LOCAL on one process."""

import dataclasses

import pytest
from parity.cells import Cell
from parity.compare import TOLERANCE, judge
from parity.evidence import Evidence
from parity.layouts import layout
from parity.models import Model
from parity.program import train
from support import fake_transformer_engine as fake
from support.pool import Pool
from torch import nn

from megatron.core import backends

_LLAMA = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "num_query_groups": 4,
    "ffn_hidden_size": 64,
}
_EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": True}
LLAMA = Model("engine-llama", settings=_LLAMA, rows=2)
GPT = Model("engine-gpt", settings={"hidden_dropout": 0.2, "layernorm_zero_centered_gamma": True}, rows=2)
MOE = Model("engine-moe", settings={**_LLAMA, **_EXPERTS, "moe_token_dispatcher_type": "alltoall"}, rows=2)
CELLS = [
    (GPT, ("tp2", "dp2-optim")),
    (LLAMA, ("sp2", "pp2")),
    (MOE, ("sp2", "ep2-etp1")),
]
SLOW_CELLS = [
    (GPT, ("sp2", "cp2-p2p")),
    (LLAMA, ("pp2-interleaved", "dp2-optim")),
    (LLAMA, ("pp2-zb-v", "dp2")),
    (LLAMA, ("dp2-optim_grads_params", "recompute-full")),
    (MOE, ("dp2-optim", "ep2")),
]


def train_by_engine(cell: Cell, steps: int, fp8: bool = False) -> Evidence:
    """Trains a rank of a cell with the stand-in."""
    found, backends.find_engine = backends.find_engine, lambda: fake.FAKE
    fake.used.clear()
    try:
        settings = {**cell.model.settings, "transformer_impl": "transformer_engine"}
        evidence = train(dataclasses.replace(cell, model=dataclasses.replace(cell.model, settings=settings)), steps)
    finally:
        backends.find_engine = found
    assert fake.used and all((recipe is not None) == fp8 for recipe in fake.used)
    return evidence


@pytest.mark.parametrize(
    ("model", "names"),
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW_CELLS)],
    ids=lambda value: getattr(value, "name", None) or "+".join(value),
)
def test_layouts_equal_ours_on_one_process(pool: Pool, model: Model, names: tuple[str, ...]) -> None:
    split = Cell(model, layout(*names))
    (expected,) = pool.run(train, 1, split.alone, 2)
    assert not judge(expected, pool.run(train_by_engine, split.layout.ranks, split, 2)).beyond(TOLERANCE)


@pytest.mark.fast("delayed")
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_kept_weights_are_those_of_the_step(pool: Pool, recipe: str) -> None:
    # The stand-in rounds nothing, so that with fp8 only a weight kept for too long would change the numbers.
    model = dataclasses.replace(MOE, name=f"engine-{recipe}")
    cell = Cell(model, layout("dp2-optim"))
    (expected,) = pool.run(train, 1, cell.alone, 3)
    fp8 = {**model.settings, "fp8": "hybrid", "fp8_recipe": recipe}
    if recipe == "delayed":  # nothing of Transformer Engine's runs again
        fp8 |= {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]}
    cell = dataclasses.replace(cell, model=dataclasses.replace(model, settings=fp8))
    assert not judge(expected, pool.run(train_by_engine, 2, cell, 3, True)).beyond(TOLERANCE)
