"""Main gradients, update rules and whole steps on a GPU, compared with float64 on the CPU; no step waits for it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.main_grad import BufferMainGrad, accumulate_product
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.segments import StateSegment, StepInputs
from megatron.core.optimizer.state_storage import Plain
from megatron.core.optimizer.update_rules import Adam, Sgd, update_segment
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.gpu

RULES: dict[str, Any] = {
    "adamw": lambda: Adam(0.9, 0.95, 1e-8, decoupled=True),
    "adam": lambda: Adam(0.9, 0.95, 1e-8, decoupled=False),
    "sgd": lambda: Sgd(0.9),
}


@pytest.mark.parametrize(
    ("dtype", "total_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.float16, torch.float32, 1e-5),
        (torch.float32, torch.float32, 1e-5),
        (torch.float64, torch.float64, 1e-14),
    ],
)
def test_products_accumulate_in_the_buffers_type(
    dtype: torch.dtype, total_dtype: torch.dtype, tolerance: float
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    left, right = (torch.randn(512, size, device="cuda").to(dtype) for size in (96, 160))
    buffer = torch.randn(96 * 160 + 7, device="cuda", dtype=total_dtype)
    before, total = buffer.double().clone(), buffer[:-7].view(96, 160)
    for factor in (1.0, 1.0, 0.5):
        accumulate_product(total, left, right, factor)
    expected = before[:-7].view(96, 160) + 2.5 * left.double().t() @ right.double()
    assert (total.double() - expected).norm() < tolerance * expected.norm()
    assert torch.equal(buffer[-7:].double(), before[-7:])


def test_rows_are_summed_in_the_same_order_every_time() -> None:
    index = torch.randint(10, (4096,), device="cuda")
    rows = torch.randn(4096, 64, device="cuda").bfloat16()
    seen = []
    for _ in range(3):
        table = nn.Parameter(torch.zeros(10, 64, device="cuda"))
        main_grad = BufferMainGrad(table, torch.zeros(10, 64, device="cuda"), lambda parameter: None)
        main_grad.add_rows(index, rows)
        seen.append(main_grad.gradient)
    expected = torch.zeros(10, 64, dtype=torch.float64, device="cuda").index_add_(0, index, rows.double())
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    assert (seen[0].double() - expected).norm() < 1e-5 * expected.norm()


def segment_of(rule: Any, dtype: torch.dtype, device: str) -> StateSegment:
    generator = torch.Generator().manual_seed(0)

    def some() -> Tensor:
        return torch.randn(1077, generator=generator, dtype=torch.float64).to(device, dtype)

    moments = {name: Plain(some().abs(), dtype) for name in rule.moments}
    return StateSegment(Plain(some(), dtype), some(), moments, torch.zeros_like(some(), dtype=torch.bfloat16), True)


def numbers_of(segment: StateSegment) -> list[Tensor]:
    return [state.decode().double().cpu() for state in (segment.weights, *segment.moments.values())]


@pytest.mark.parametrize("decay_on_device", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("kind", RULES)
def test_update_rules_equal_those_on_the_cpu(
    kind: str, dtype: torch.dtype, tolerance: float, skip: bool, decay_on_device: bool
) -> None:
    rule, results = RULES[kind](), []
    for device, width in (("cpu", torch.float64), ("cuda", dtype)):
        held = segment_of(rule, width, device)
        decay = torch.tensor(0.1, dtype=torch.float64, device=device) if decay_on_device else 0.1
        step = StepInputs(
            torch.tensor(3.0, device=device),
            torch.tensor(1.7, dtype=torch.float64, device=device),
            torch.tensor(skip, device=device),
        )
        update_segment(rule, held, step, torch.tensor(0.03, dtype=torch.float64, device=device), decay)
        assert skip or (held.model_weights == held.weights.decode().bfloat16()).all()
        results.append(numbers_of(held))
    before = numbers_of(segment_of(rule, dtype, "cpu"))
    for expected, got, old in zip(*results, before, strict=True):
        assert (got - expected).norm() < tolerance * expected.norm()
        assert torch.equal(got, old) == skip


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("optimizer_name", ["adam", "sgd", "muon", "narrow"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp64"])
def test_steps_do_not_wait_for_the_device(precision: str, optimizer_name: str) -> None:
    narrow = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16}
    chosen: dict[str, Any] = narrow if optimizer_name == "narrow" else {"optimizer": optimizer_name}
    chosen |= {"muon_extra_scale_factor": 0.2}
    flags = {precision: True} if precision != "fp32" else {}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        **flags,
    )
    model: nn.Module = GPTModel(config, get_gpt_layer_local_spec(), 100, 64, share_embeddings_and_output_weights=True)
    model = model.cuda()
    if precision in ("bf16", "fp16"):
        model = Float16Module(config, model)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
    optimizer_config = OptimizerConfig(
        lr=0.01,
        **chosen,
        fp16=precision == "fp16",
        bf16=precision == "bf16",
        log_num_zeros_in_grad=True,
        initial_loss_scale=2.0**15,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [ddp], stop_on_nonfinite=True)
    config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 0.01, 0.0, 8, 1000, "cosine", 0.0, 0.1, 100, "linear")
    ids = torch.randint(100, (4, 65), device="cuda")
    iteration = torch.zeros((), dtype=torch.int64, device="cuda")

    def forward_step(iterator: Any, chunk: nn.Module) -> tuple[Tensor, Any]:
        tokens = Tokens(64, 4, random=RngPosition(1, iteration, 0))
        losses = chunk(ids[:, :-1], None, None, labels=ids[:, 1:], tokens=tokens)
        return losses.sum(), partial(reported, losses.numel())

    def reported(count: int, output: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
        return output, count, {"lm loss": output.detach() / count}

    run = get_forward_backward_func()
    losses, updates = [], []
    for step in range(20):
        if step == 2:  # the first steps may load kernels
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        ddp.zero_grad_buffer()
        reports = run(forward_step_func=forward_step, data_iterator=None, model=ddp, num_microbatches=2)
        updates.append(optimizer.step_on_device(torch.stack([r["lm loss"] for r in reports]).isfinite().all()))
        scheduler.advance_on_device(updates[-1].update_applied, 4)
        iteration += 1
        losses.append(reports[0]["lm loss"])
    torch.cuda.set_sync_debug_mode("default")
    assert all(bool(update.update_applied) for update in updates[-5:])
    assert float(losses[-1]) < float(losses[0]) - 0.3
