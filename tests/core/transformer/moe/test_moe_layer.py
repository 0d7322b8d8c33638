"""A layer of experts on one rank: what it computes, when, how it is called, and what its weights are called."""

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pool import Pool
from support.tiny_models import tiny_config, tiny_gpt
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.backends import LOCAL, backend_of_layer
from megatron.core.communication import async_collective, collectives
from megatron.core.communication.collectives import HostCopy
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.initializers import EachOf, XavierUniform, each_of
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.parameters import info_of, initialize_parameters, name_parameters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import allgather_dispatcher, alltoall_dispatcher
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu}


def build(groups: ProcessGroupCollection | None = None, grouped: bool = True, **settings: Any) -> MoELayer:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 4, "moe_ffn_hidden_size": 6}
    config = tiny_config(**sizes | settings)
    model = nn.Module()
    parts = MoESubmodules(experts=GroupedMLP if grouped else SequentialMLP)
    model.mlp = MoELayer(config, parts, layer_number=1, pg_collection=groups)
    name_parameters(model)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator) * 0.5)
    return model.mlp


def hidden(t: int = 12) -> Tensor:
    return torch.randn(t, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def by_hand(layer: MoELayer, x: Tensor) -> Tensor:
    """Token by token, choice by choice, from the formulas."""
    weights, chosen = layer.router(x[:, None])
    fc1, fc2 = layer.experts.linear_fc1, layer.experts.linear_fc2
    output = torch.zeros_like(x)
    for t, e in chosen.nonzero().tolist():
        gate, up = (x[t] @ fc1.weight[e].t() + fc1.bias[e]).chunk(2)
        output[t] += (F.silu(gate) * up * weights[t, e]) @ fc2.weight[e].t() + fc2.bias[e] * weights[t, e]
    shared = layer.shared_experts
    gate, up = (x @ shared.linear_fc1.weight.t() + shared.linear_fc1.bias).chunk(2, -1)
    dense = (F.silu(gate) * up) @ shared.linear_fc2.weight.t() + shared.linear_fc2.bias
    return output + dense * torch.sigmoid(x @ shared.gate_weight.t())


@pytest.mark.parametrize("overlap", [False, True])
def test_the_sum_of_experts_by_weight_and_the_shared_ones(overlap: bool) -> None:
    shared = {"moe_shared_expert_intermediate_size": 10, "moe_shared_expert_gate": True}
    layer = build(**SWIGLU, **shared, moe_shared_expert_overlap=overlap)
    x = hidden()
    output, bias = layer(x, LayerInputs(Tokens(6, 2)))
    assert bias is None
    torch.testing.assert_close(output, by_hand(layer, x), rtol=1e-12, atol=1e-12)
    # By itself it takes [s, b, h] too.
    assert torch.equal(layer(x.view(6, 2, 8))[0], output.view(6, 2, 8))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize(
    ("grouped", "kernel", "precision", "asks"),
    [
        (False, True, {"bf16": True}, True),
        (True, True, {"bf16": True}, False),
        (True, False, {"bf16": True}, True),
        (True, True, {"fp64": True}, True),
        (True, True, {"bf16": True, "moe_ffn_hidden_size": 6}, True),
    ],
    ids=["one by one", "one product", "a loop over products", "a loop in other types", "a loop for odd widths"],
)
def test_sizes_that_the_host_is_asked_for_are_on_their_way_from_the_start(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, kernel: bool, precision: Any, asks: bool, dispatcher: str
) -> None:
    """One rank, and nothing dropped: a rank's experts are the only ones that could ask."""
    events, sizes = [], []

    class Told(HostCopy):
        def __init__(self, tensor: Tensor) -> None:
            events.append("begun")
            super().__init__(tensor)

        def wait(self) -> Tensor:
            events.append("awaited")
            return super().wait()

    def moved(*arguments: Any) -> Tensor:
        events.append("rows moved")
        return LOCAL.experts.permute(*arguments)

    for module in (allgather_dispatcher, alltoall_dispatcher):
        monkeypatch.setattr(module, "HostCopy", Told)
    replaced = {"grouped_linear": lambda *arguments: LOCAL.experts.grouped_linear(*arguments)} if kernel else {}
    backend = LOCAL.with_operations(experts={"permute": moved, **replaced})
    settings = {"num_layers": 1, "num_moe_experts": 4, "moe_ffn_hidden_size": 16, **precision}
    config = TransformerConfig(
        hidden_size=8, num_attention_heads=2, moe_token_dispatcher_type=dispatcher, **SWIGLU, **settings
    )
    parts = MoESubmodules(experts=GroupedMLP if grouped else SequentialMLP)
    layer = MoELayer(config, parts, layer_number=1, backend=backend)
    layer.experts.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[2].sizes))
    layer(torch.randn(5, 1, 8, dtype=config.params_dtype))
    assert [size is not None for size in sizes] == [asks]
    assert [event for event in events if event != "rows moved"] == ["begun", "awaited"] * asks
    assert (events[0], events[-1]) == (("begun", "awaited") if asks else ("rows moved", "rows moved"))


def test_a_latent_width_is_what_experts_work_at() -> None:
    layer = build(moe_latent_size=4, add_bias_linear=False, activation_func=F.relu)
    x = hidden()
    weights, _ = layer.router(x[:, None])
    narrow = x @ layer.fc1_latent_proj.weight.t()
    fc1, fc2 = (part.weight for part in (layer.experts.linear_fc1, layer.experts.linear_fc2))
    every = torch.einsum("tef,ehf->teh", torch.einsum("th,efh->tef", narrow, fc1).relu(), fc2)
    expected = torch.einsum("te,teh->th", weights, every) @ layer.fc2_latent_proj.weight.t()
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_weights_on_inputs() -> None:
    settings = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "add_bias_linear": False}
    layer = build(moe_apply_probs_on_input=True, activation_func=F.relu, **settings)
    other = build(activation_func=F.relu, **settings)
    x = hidden()
    # relu(w x) = w relu(x) for w > 0: then the two are one.
    torch.testing.assert_close(layer(x)[0], other(x)[0], rtol=1e-12, atol=1e-12)
    square = {"activation_func": lambda y: y * y, **settings}
    squared = [build(moe_apply_probs_on_input=on_input, **square) for on_input in (False, True)]
    weights = layer.router(x[:, None])[0].sum(1, keepdim=True)
    torch.testing.assert_close(squared[1](x)[0], squared[0](x)[0] * weights, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------


class Events(CooperativeTurn):
    """What happens in which order, told by what is called."""

    def __init__(self, layer: MoELayer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        for name in ("start_all_to_all_rows", "start_gather_rows", "start_reduce_scatter_rows"):
            monkeypatch.setattr(async_collective, name, partial(self.begun, getattr(collectives, name)))
        layer.shared_experts.linear_fc1.register_forward_hook(lambda *unused: self.seen.append("fc1"))
        layer.shared_experts.linear_fc2.register_forward_hook(lambda *unused: self.seen.append("fc2"))
        for name in ("fc1", "fc2"):
            linear = getattr(layer.shared_experts, f"linear_{name}")
            linear.weight.register_post_accumulate_grad_hook(lambda *unused, name=name: self.seen.append(f"d{name}"))

    def begun(self, start: Any, *arguments: Any) -> Any:
        self.seen.append("start")
        pending = start(*arguments)
        wait = pending.wait

        def wait_watched() -> Any:
            self.seen.append("wait")
            return wait()

        pending.wait = wait_watched
        return pending

    def yield_turn(self) -> None:
        self.seen.append("hand over")


def order_of_events(dispatcher: str) -> list[str]:
    groups = ProcessGroupCollection.from_grid(RankGrid(2, expert=2), dist.get_rank())
    settings = {"moe_shared_expert_intermediate_size": 10, "moe_shared_expert_overlap": True, "add_bias_linear": False}
    layer = build(groups, moe_token_dispatcher_type=dispatcher, **settings)
    with pytest.MonkeyPatch.context() as monkeypatch:
        events = Events(layer, monkeypatch)
        x = hidden().requires_grad_()
        output, _ = layer(x, LayerInputs(Tokens(6, 2), turn=events))
        events.seen.append("backward")
        output.sum().backward()
    return events.seen


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_shared_experts_are_computed_and_turns_are_handed_over_while_rows_are_under_way(
    dispatcher: str, pool: Pool
) -> None:
    go = ["start", "start", "fc1", "wait", "wait", "start", "fc2", "wait"]
    back = ["start", "dfc2", "hand over", "wait", "start", "start", "dfc1", "hand over", "wait", "wait"]
    for seen in pool.run(order_of_events, 2, dispatcher):
        assert seen == [*go, "backward", *back]


def lives_of_rows(kind: str) -> list[str]:
    """What of the rows that travel still has memory where it is not needed any more."""
    from megatron.core.communication import async_collective

    groups = ProcessGroupCollection.from_grid(RankGrid(2, expert=2), dist.get_rank())
    layer = build(groups, moe_token_dispatcher_type=kind, add_bias_linear=False)
    original, backend = async_collective.start_all_to_all_rows, layer.token_dispatcher.backend
    sent, received, alive = [], [], []

    def watched(rows: Tensor, *sizes: Any) -> collectives.Pending:
        pending = original(rows, *sizes)
        sent.append(StorageWeakRef(rows.untyped_storage()))
        received.append(StorageWeakRef(pending.tensor.untyped_storage()))
        return pending

    def compute(*inputs: Any) -> Tensor:
        alive.extend(f"received {n}" for n, one in enumerate(received) if not gone_soon(one))
        taken.append(StorageWeakRef(inputs[0].untyped_storage()))
        return experts(*inputs)

    def unpermute(rows: Tensor, copies: Any) -> Tensor:
        if len(sent) == travelled + 1:  # at home
            alive.extend(f"sent {n}" for n, one in enumerate(sent) if not gone_soon(one))
            alive.extend("taken by experts" for one in taken if not gone_soon(one))
        return backend.experts.unpermute(rows, copies)

    taken: list[Any] = []
    travelled = 3 if kind == "flex" else 2
    experts, layer.experts.forward = layer.experts.forward, compute
    layer.token_dispatcher.backend = backend.with_operations(experts={"unpermute": unpermute})
    async_collective.start_all_to_all_rows = watched
    try:
        with torch.no_grad():
            layer(hidden())
    finally:
        async_collective.start_all_to_all_rows = original
    assert len(sent) == travelled + 1
    return alive


def gone_soon(storage: StorageWeakRef) -> bool:
    """Whether nobody holds it, once gloo's thread, which lets go of it after it has woken who waits, is through."""
    deadline = time.monotonic() + 60
    while not storage.expired() and time.monotonic() < deadline:
        time.sleep(0.001)
    return storage.expired()


@pytest.mark.parametrize("kind", ["alltoall", "flex"])
def test_rows_go_when_what_is_made_of_them_is_there(kind: str, pool: Pool) -> None:
    assert pool.run(partial(lives_of_rows, kind), 2) == [[], []]


# ---------------------------------------------------------------------------------------------------------------------


def test_experts_one_after_the_other_and_grouped_are_the_same_weights_under_megatron_lms_names() -> None:
    grouped, sequential = build(**SWIGLU), build(**SWIGLU, grouped=False)
    names = set(grouped.state_dict())
    stacked = ("linear_fc1.weight", "linear_fc2.bias")
    assert {f"experts.{name}{i}" for name in stacked for i in range(4)} <= names
    for i, expert in enumerate(sequential.experts.local_experts):
        assert isinstance(expert, MLP) and f"experts.local_experts.{i}.linear_fc1.weight" in sequential.state_dict()
        for name, parameter in expert.named_parameters():
            info = info_of(parameter)
            assert info.name == f"mlp.experts.{name}" and info.grid == "expert" and "ep" in info.sharded_axes
            module, _, kind = name.partition(".")
            whole = getattr(getattr(grouped.experts, module), kind)
            assert info.global_shape == info_of(whole).global_shape and info.box.start[0] == i
    state = grouped.state_dict()
    other = build(**SWIGLU)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    x = hidden()
    assert torch.equal(other(x)[0], grouped(x)[0])
    del state["experts.linear_fc1.weight2"]
    with pytest.raises(RuntimeError, match=r"Missing key.*experts.linear_fc1.weight"):
        other.load_state_dict(state)


def test_each_expert_is_drawn_as_a_matrix_of_its_own() -> None:
    """Glorot's bound goes by an expert's own sizes; a user's function gets one expert at a time."""
    layer = build(**SWIGLU, init_method=XavierUniform(), output_layer_init_method=nn.init.orthogonal_)
    model = nn.Module()
    model.mlp = layer
    initialize_parameters(model, 3)
    bound = (6.0 / (2 * 6 + 8)) ** 0.5
    largest = layer.experts.linear_fc1.weight.abs().amax((1, 2))
    assert (largest < bound).all() and (largest > 0.95 * bound).all()
    for matrix in layer.experts.linear_fc2.weight:  # [8, 6]: its columns are orthonormal
        torch.testing.assert_close(matrix.t() @ matrix, torch.eye(6, dtype=torch.float64), atol=1e-6, rtol=0)
    assert not torch.equal(layer.experts.linear_fc2.weight[0], layer.experts.linear_fc2.weight[1])
    assert isinstance(each_of(nn.init.orthogonal_), EachOf)


def test_tensor_parallel_ranks_train_experts_on_tokens_of_their_own_only() -> None:
    groups = ProcessGroupCollection.from_grid(RankGrid(2, tensor=2), 1)
    layer = build(groups, tensor_model_parallel_size=2)
    with pytest.raises(UserError, match="over 2 tensor parallel ranks with sequence_parallel only"):
        layer(hidden())


def test_a_model_gives_its_padding_mask_to_routers() -> None:
    settings = tiny_config(hidden_size=8, ffn_hidden_size=8, num_moe_experts=4, add_bias_linear=False)
    model = tiny_gpt(settings, 16, 6, position_embedding_type="none")
    ids, mask = torch.arange(12).view(2, 6), torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    routed, padded = model(ids), model(ids, padding_mask=mask)
    # Without padding an expert has more rows, which changes the last bit of its products on some processors.
    torch.testing.assert_close(routed[~mask], padded[~mask], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(routed[mask], padded[mask])


def test_experts_are_grouped_in_fp8() -> None:
    class OwnLinear(ColumnParallelLinear):
        """A script's own class, which a grouped product would leave out."""

    config = tiny_config(hidden_size=16, num_moe_experts=2, moe_ffn_hidden_size=16, fp8="hybrid")
    backend = backend_of_layer(LOCAL, config, 1, ProcessGroupCollection(cp=None))
    one_by_one = gpt_layer_spec_of(config, 1).submodules.mlp.submodules
    for parts in (None, MoESubmodules(), one_by_one):
        assert isinstance(MoELayer(config, parts, backend=backend).experts, GroupedMLP)
        assert isinstance(MoELayer(config, parts, backend=LOCAL).experts, SequentialMLP)
    own = MLPSubmodules(linear_fc1=OwnLinear, linear_fc2=RowParallelLinear)
    with pytest.raises(UserError, match="has to name GroupedMLP"):
        MoELayer(config, MoESubmodules(experts=ModuleSpec(SequentialMLP, submodules=own)), backend=backend)
