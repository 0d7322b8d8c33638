"""The wrappings of a model: recompute changes memory and time, and no bit of the numbers."""

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import Outcome, differences, train, train_on_ranks

from megatron.core import attention_plan
from megatron.core.exceptions import UserError
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import warn

RUN = "--num-layers 3 --train-iters 3 --eval-iters 0 --log-interval 1"


def watched(flags: str) -> tuple[Outcome, Counter[int], list[list[torch.Tensor]]]:
    """A run; how often each layer's MLP was computed; the gradients of each iteration."""
    calls: Counter[int] = Counter()
    gradients: list[list[torch.Tensor]] = []

    def watch(run: Any) -> None:
        modules = dict(run.model[0].named_modules())
        for name, module in modules.items():
            if name.endswith(".mlp"):
                layer = int(name.split(".")[-2])
                module.register_forward_pre_hook(lambda *_, layer=layer: calls.update([layer]))
        step = run.optimizer.step_on_device

        def keeping(*inputs: Any) -> Any:
            gradients.append([unit.grad_buffer.clone() for unit in run.optimizer.units])
            return step(*inputs)

        run.optimizer.step_on_device = keeping

    return train(f"{RUN} {flags}", before=watch), calls, gradients


def test_a_model_that_the_memory_cannot_hold() -> None:
    """The embedding is larger than the address space of a process, so no system promises the memory."""
    sizes = "--hidden-size 800000 --vocab-size 2000000000"
    with pytest.raises(UserError, match=r"one tensor takes 6,400,000\.\d GB; --dry-run prints"):
        train(f"--mock-data {RUN} {sizes}")


FULL = "--recompute-granularity full --recompute-method"


@pytest.mark.slow_cases("")
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_full_recompute_is_bit_equal(corpus, precision):
    """With dropout on: every gradient of every iteration, and which layers are computed twice."""
    data = f"--data-path {corpus} {precision}"
    plain, calls, gradients = watched(data)
    assert calls == {0: 12, 1: 12, 2: 12}  # 3 iterations of 4 micro-batches
    for way, again in (("uniform --recompute-num-layers 1", {0, 1, 2}), ("block --recompute-num-layers 2", {0, 1})):
        outcome, computed, found = watched(f"{data} {FULL} {way}")
        assert computed == {layer: 24 if layer in again else 12 for layer in range(3)}, way
        for one, other in zip(found, gradients, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), way
        assert outcome.losses == plain.losses and differences(outcome.at_end, plain.at_end) == []


def test_recompute_leaves_evaluation_alone(corpus):
    flags = f"--data-path {corpus} --train-iters 1 --eval-iters 2"
    plain = train(flags)
    again = train(f"{flags} {FULL} uniform --recompute-num-layers 1")
    assert [v.losses for v in again.validations] == [v.losses for v in plain.validations]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("", torch.float32), ("--bf16", torch.bfloat16), ("--fp16", torch.float16), ("--fp64", torch.float64)],
)
def test_the_number_format_of_weights_and_gradients(corpus, precision, dtype):
    found: dict[str, Any] = {}

    def look(run: Any) -> None:
        found["wrapped"] = isinstance(run.model[0].module, Float16Module)
        found["weights"] = {parameter.dtype for parameter in run.model[0].parameters()}
        found["gradients"] = {unit.grad_buffer.dtype for unit in run.model[0].units}

    train(f"{RUN} --train-iters 1 --data-path {corpus} {precision}", before=look)
    assert found["wrapped"] == (dtype in (torch.bfloat16, torch.float16))
    assert found["weights"] == {dtype}
    assert found["gradients"] == {torch.promote_types(dtype, torch.float32)}


@pytest.mark.slow_cases(
    "-1", "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce-4"
)
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce", 4),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --decoder-first-pipeline-num-layers 1", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --overlap-param-gather", 2),
    ],
)
def test_losses_in_chunks_change_memory_only(corpus, layout: str, ranks: int) -> None:
    """13 does not divide the tokens of a rank. The flag saves logits, and the numbers are the same to rounding."""
    command = f"{RUN} --data-path {corpus} --fp64 --micro-batch-size 2 --global-batch-size 4"
    plain = train(command)
    found = train_on_ranks(f"{command} --loss-chunk-size 13 {layout}", ranks)
    assert plain.losses and found[-1].losses == pytest.approx(plain.losses, rel=1e-11)


@pytest.mark.parametrize("flags", ["flash --fp64 --attention-dropout 0.1", "fused --attn-logit-softcapping 5"])
def test_an_attention_backend_that_cannot_compute_the_model_is_replaced(corpus, monkeypatch, caplog, flags):
    """On a GPU a warning says so; here only the choice of kernels believes in one."""
    command = f"--data-path {corpus} --train-iters 1 --eval-iters 0 --attention-backend {flags}"
    losses = train(command).losses
    monkeypatch.setattr(attention_plan, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    warn._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert train(command).losses == losses
    told = [record.getMessage() for record in caplog.records if "--attention-backend" in record.getMessage()]
    assert len(told) == 1 and f"--attention-backend {flags.split()[0]}: attention uses plain torch, because" in told[0]
