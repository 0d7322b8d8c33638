"""Transformer Engine on a GPU: each operation and whole models against float64 or LOCAL, each fp8 recipe, training."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.backends import choose_backend
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.main_grad import attach_main_grad
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.recipes import Fp8Settings
from megatron.core.ops.linear import linear
from megatron.core.ops.moe.grouped_linear import RowGroups, grouped_linear
from megatron.core.ops.norm import layer_norm, rms_norm
from megatron.core.ops.transformer_engine.attention import EngineAttention
from megatron.core.ops.transformer_engine.engine import Engine, find_engine
from megatron.core.ops.transformer_engine.linear import make_grouped_linear, make_linear
from megatron.core.ops.transformer_engine.norm import EngineNorms
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router_replay import router_replays
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.gpu

FOUND = find_engine()
"""It is imported before any test runs: after torch has loaded its own cuDNN, the import fails."""
RECIPES = ["delayed", "tensorwise", "blockwise"]
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "moe_grouped_gemm": True,
    "moe_enable_routing_replay": True,
}
MODELS = {"gpt": {}, "llama": LLAMA, "moe": {**LLAMA, **EXPERTS, "moe_token_dispatcher_type": "alltoall"}}


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def engine() -> Engine:
    if isinstance(FOUND, str):
        pytest.skip(f"Transformer Engine: {FOUND}")
    return FOUND


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def off(found: Tensor, exact: Tensor) -> float:
    """Returns the error's share of the exact values' norm."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def fp8(recipe: str | None) -> Fp8Settings | None:
    return None if recipe is None else Fp8Settings(recipe, FORMATS["hybrid"])


BOUND = {None: 0.01, "delayed": 0.08, "tensorwise": 0.08, "blockwise": 0.08}
"""Two bf16 roundings, or two fp8 roundings of 3 and 2 bits of mantissa, as shares of the norm."""


@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_linear(engine: Engine, recipe: str | None, main_grads: bool) -> None:
    x, dy = random(256, 2, 512).requires_grad_(), random(256, 2, 1024, seed=2)
    weight, bias = nn.Parameter(random(1024, 512, seed=3) * 0.05), nn.Parameter(random(1024, seed=4))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    output = linear(*exact)
    expected = [output, *torch.autograd.grad(output, exact, dy.double())]
    total, done = torch.zeros(1024, 512, device="cuda"), []
    if main_grads:
        attach_main_grad(weight, total, done.append)
    layer = make_linear(engine, fp8(recipe), weight)
    for _ in range(3 if recipe == "delayed" else 2):  # delayed scaling needs a step to find its scales
        x.grad = weight.grad = bias.grad = None
        before = total.clone()
        result = layer(x, weight, bias)
        result.backward(dy)
    given = [result, x.grad, total - before if main_grads else weight.grad, bias.grad]
    errors = [off(a, e) for a, e in zip(given, expected, strict=True)]
    print(f"linear, {recipe}, main grads {main_grads}: errors {[f'{error:.1e}' for error in errors]}")
    assert max(errors) < BOUND[recipe]
    assert not main_grads or (weight.grad is None and len(done) == (3 if recipe == "delayed" else 2))


@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_experts(engine: Engine, recipe: str | None, main_grads: bool) -> None:
    groups = RowGroups(torch.tensor([100, 0, 37, 163], device="cuda"))
    x, dy = random(300, 512).requires_grad_(), random(300, 256, seed=2)
    weight = nn.Parameter(random(4, 256, 512, seed=3) * 0.05)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    output = grouped_linear(*exact, groups)
    expected = [output, *torch.autograd.grad(output, exact, dy.double())]
    total = torch.zeros(4, 256, 512, device="cuda")
    if main_grads:
        attach_main_grad(weight, total, lambda parameter: None)
    layer = make_grouped_linear(engine, fp8(recipe), weight)
    for _ in range(3 if recipe == "delayed" else 2):
        x.grad = weight.grad = None
        before = total.clone()
        result = layer(x, weight, groups)
        result.backward(dy)
    given = [result, x.grad, total - before if main_grads else weight.grad]
    errors = [off(a, e) for a, e in zip(given, expected, strict=True)]
    print(f"experts, {recipe}, main grads {main_grads}: errors {[f'{error:.1e}' for error in errors]}")
    assert max(errors) < BOUND[recipe]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_norms(engine: Engine, kind: str, zero_centered: bool) -> None:
    arguments = [random(64, 3, 512).requires_grad_(), nn.Parameter(random(512, seed=2)), nn.Parameter(random(512))]
    arguments = arguments[: 3 if kind == "layer_norm" else 2]
    exact = [tensor.detach().double().requires_grad_() for tensor in arguments]
    results, dy = [], random(64, 3, 512, seed=5)
    norms = EngineNorms(engine)
    assert engine.takes(arguments[0], arguments[1])
    reference = {"layer_norm": layer_norm, "rms_norm": rms_norm}[kind]
    for norm, inputs in ((reference, exact), (getattr(norms, kind), arguments)):
        output = norm(*inputs, 1e-5, zero_centered)
        results.append([output, *torch.autograd.grad(output, inputs, dy.to(output.dtype))])
    assert max(off(found, expected) for expected, found in zip(*results, strict=True)) < 0.02


CALLS = {
    "causal": ({}, False),
    "window": ({"window": (100, 0)}, False),
    "both ways": ({"causal": False}, False),
    "packed": ({}, True),
}


@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("name", CALLS)
def test_attention(engine: Engine, name: str, widths: tuple[int, int]) -> None:
    more, packed = CALLS[name]
    b = 1 if packed else 2
    inputs = [
        random(256, b, a, d, seed=a + d).requires_grad_() for a, d in zip((4, 2, 2), (widths[0], *widths), strict=True)
    ]
    edges = torch.tensor([0, 100, 100, 101, 256, 256], dtype=torch.int32, device="cuda") if packed else None
    call = AttentionCall(cu_seqlens=edges, max_seqlen=155 if packed else None)
    variant = AttentionVariant(**{"scale": widths[0] ** -0.5, "causal": True, **more})
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected, result = attention(*exact, variant, call), EngineAttention(engine)(*inputs, variant, call)
    dy = random(256, b, 4, widths[1], seed=7)
    wanted = [expected, *torch.autograd.grad(expected, exact, dy.double())]
    given = [result, *torch.autograd.grad(result, inputs, dy)]
    assert max(off(found, e) for found, e in zip(given, wanted, strict=True)) < 0.02


def model_of(name: str, impl: str, dtype: torch.dtype, **more: object) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        transformer_impl=impl,
        **MODELS[name],
        **more,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    where = {"position_embedding_type": "rope"} if name != "gpt" else {}
    return GPTModel(config, spec, vocab_size=1000, max_sequence_length=128, **where).to("cuda")


Routing = list[list[Tensor]]
"""For each router, the experts that it chose in each forward."""


@contextlib.contextmanager
def routed(model: GPTModel, routing: Routing, records: bool) -> Iterator[None]:
    """Sends tokens to the experts of `routing`, or writes the routers' own choice into it. A token whose experts score
    almost alike would go elsewhere in lower precision: one of 128 tokens changes an expert's gradient by an eighth."""
    replays = router_replays(model)
    for number, replay in enumerate(replays):
        if records:
            replay.record()
        else:
            replay.replay(routing[number])
    yield
    if records:
        routing[:] = [replay.recorded for replay in replays]
    for replay in replays:
        replay.stop()


def results_of(model: GPTModel, packed: bool, routing: Routing, records: bool = False) -> list[Tensor]:
    ids = torch.randint(1000, (1 if packed else 4, 129), generator=torch.Generator().manual_seed(1)).cuda()
    more = {}
    if packed:
        edges = torch.tensor([0, 50, 51, 128], dtype=torch.int32, device="cuda")
        more["packed_seq_params"] = PackedSeqParams("thd", edges, edges, max_seqlen_q=77, max_seqlen_kv=77)
    with routed(model, routing, records):
        losses = model(ids[:, :-1], labels=ids[:, 1:], **more)
        losses.mean().backward()
    return [losses.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_local(engine: Engine, name: str, dtype: torch.dtype, packed: bool) -> None:
    routing: Routing = []
    ours = results_of(model_of(name, "local", torch.float32), packed, routing, records=True)
    model = model_of(name, "transformer_engine", dtype)
    assert choose_backend(model.config).engine is engine
    given = results_of(model, packed, routing)
    local = results_of(model_of(name, "local", dtype), packed, routing)
    errors, limits = ([off(found, exact) for found, exact in zip(each, ours, strict=True)] for each in (given, local))
    print(f"{name}, {dtype}, packed {packed}: largest error {max(errors):.1e}, of LOCAL {max(limits):.1e}")
    spare = 1e-4 if dtype is torch.float32 else 0.01
    assert all(error < 1.5 * limit + spare for error, limit in zip(errors, limits, strict=True)), (errors, limits)
    state, own = model.state_dict(), model_of(name, "local", dtype).state_dict()
    assert list(state) == list(own) and all(torch.equal(state[key], own[key]) for key in own)


FP8 = {
    None: {},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_margin": 1,
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "max",
    },
}
"""Settings of each recipe. With delayed scaling a step of its history is a micro-batch, of ours a global batch; the
margin and the largest value of the history keep both from clipping."""
STEPS = 4


class Training:
    """A model in bf16, with main gradients and an optimizer, whose steps have two micro-batches."""

    def __init__(self, name: str, impl: str, recipe: str | None) -> None:
        self.model = model_of(name, impl, torch.bfloat16, **FP8[recipe])
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.wrapped = DistributedDataParallel(self.model.config, config, self.model)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, bf16=True, clip_grad=1.0), [self.wrapped])

    def backward(self, ids: Tensor, routing: Routing) -> dict[str, Tensor]:
        """Returns the gradients of the mean loss, and the losses of tokens as "loss"."""
        self.wrapped.zero_grad_buffer()
        losses = backward_of(self.wrapped, self.model, ids, routing, records=False)
        finalize_model_grads([self.wrapped])
        return {"loss": losses, **{name: p.main_grad.clone() for name, p in trained(self.model).items()}}

    def step(self, gradients: dict[str, Tensor]) -> None:
        """Updates the weights by other gradients than the model's own."""
        for name, parameter in trained(self.model).items():
            parameter.main_grad.copy_(gradients[name])
        self.optimizer.step()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def backward_of(wrapped: nn.Module, model: GPTModel, ids: Tensor, routing: Routing, records: bool) -> Tensor:
    losses = []
    with routed(model, routing, records):
        for rows in ids.split(2):
            losses.append(wrapped(rows[:, :-1], labels=rows[:, 1:]))
            (losses[-1].mean() / 2).backward()
    return torch.cat(losses).detach()


def exact_gradients(model: GPTModel, weights: nn.Module, ids: Tensor, routing: Routing) -> dict[str, Tensor]:
    """Returns what `Training.backward` does, in float32 at the weights of another model. Writes the routing."""
    with torch.no_grad():
        for name, parameter in trained(weights).items():
            model.get_parameter(name).copy_(parameter)
    model.zero_grad()
    losses = backward_of(model, model, ids, routing, records=True)
    return {"loss": losses, **{name: parameter.grad for name, parameter in trained(model).items()}}


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_in_training_are_as_near_to_float32s_as_ours(engine: Engine, name: str, recipe: str | None) -> None:
    """Both models take the steps of float32's gradients, so that all are compared at the same weights. Losses of models
    that go their own ways say nothing: after 5 steps of this model ours with fp8 and without are 0.3 to 0.5 apart."""
    ours, its = (Training(name, impl, recipe) for impl in ("local", "transformer_engine"))
    exact, routing = model_of(name, "local", torch.float32), []
    ids = torch.randint(1000, (4, 129), generator=torch.Generator().manual_seed(1)).cuda()
    errors, curve = {}, []
    for step in range(STEPS):
        wanted = exact_gradients(exact, ours.model, ids, routing)
        for _ in range(6 if recipe == "delayed" and step == 0 else 1):  # its scales are 1 at first
            given = [training.backward(ids, routing) for training in (ours, its)]
        assert all(one.keys() == wanted.keys() for one in given)
        for key in wanted:
            errors.setdefault(key, []).append([off(one[key], wanted[key]) for one in given])
        curve.append(float(wanted["loss"].mean()))
        for training in (ours, its):
            training.step(wanted)
        weights = trained(its.model)
        assert all(torch.equal(parameter, weights[key]) for key, parameter in trained(ours.model).items())
    assert curve[-1] < curve[0] - 0.2
    means = {key: torch.tensor(rows).square().mean(0).sqrt().tolist() for key, rows in errors.items()}  # over steps
    found = sorted(((its_own / limit, key, its_own, limit) for key, (limit, its_own) in means.items()), reverse=True)
    print(f"{name}, {recipe}: largest error {max(row[2] for row in found):.3f}, largest ratio to ours {found[0]}")
    beyond = [row for row in found if row[2] >= 1.5 * row[3] + 0.01]
    assert not beyond, beyond


def test_our_layers_compute_with_settings_that_its_recipes_lack(engine: Engine) -> None:
    """tests/training/config/test_derived_values.py shows the line that says so."""
    for margin, expected in ((0, engine), (1, None)):
        fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_margin": margin}
        config = model_of("llama", "transformer_engine", torch.bfloat16, **fp8).config
        assert choose_backend(config).engine is expected


def test_the_log_says_what_is_whose(engine: Engine) -> None:
    backend = choose_backend(model_of("llama", "transformer_engine", torch.bfloat16).config)
    assert backend.engine is engine and "its linear layers" in backend.describe("cuda")
