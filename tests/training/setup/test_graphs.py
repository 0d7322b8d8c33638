"""Runs with graphs give the bits of runs without. The graphs are those of `support.graph_recorder`, which a CPU has."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
from support.graph_recorder import OperationRecorder
from support.processes import run_on_ranks
from support.runs import GPT, Outcome, differences, train
from torch import Tensor

import pretrain_gpt
from megatron.core import backends
from megatron.core.exceptions import UserError
from megatron.core.health.rerun_state_machine import get_rerun_state_machine
from megatron.core.ops.dropout.dropout import keep_rows
from megatron.core.ops.moe.grouped_linear import GroupedProducts, RowGroups, grouped_linear
from megatron.core.tokens import RngPosition
from megatron.training.providers import Context, ForwardStep, Providers
from megatron.training.setup import graphs

NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
GRAPHS = "--cuda-graph-impl local --cuda-graph-scope full_iteration --cuda-graph-warmup-steps 1"
EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 1e-3 "
    "--moe-router-load-balancing-type aux_loss --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--log-interval 2"
)
RUNS = {
    "gpt with dropout": "--train-iters 4 --attention-dropout 0.1 --hidden-dropout 0.1 --bf16 --eval-interval 2",
    "llama": f"--train-iters 4 {NO_DROPOUT} --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--group-query-attention --num-query-groups 1 --untie-embeddings-and-output-weights --disable-bias-linear "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --calculate-per-token-loss",
    "growing batch, predictions and a loss scale": f"--train-samples 14 --rampup-batch-size 2 2 8 {NO_DROPOUT} --fp16 "
    "--num-layers 1 --mtp-num-layers 1 --initial-loss-scale 65536 --loss-scale-window 2",
    "fp8 with scales of earlier steps": f"--train-iters 5 {NO_DROPOUT} --bf16 --fp8-format hybrid --fp8-recipe delayed "
    "--fp8-amax-history-len 4 --fp8-amax-compute-algo max --num-layers 1 --eval-interval 2",
    "grouped experts": f"--train-iters 4 {NO_DROPOUT} --bf16 --num-layers 1 {EXPERTS} --moe-grouped-gemm",
}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> OperationRecorder:
    """The recorder of a run. Dropout masks are drawn by operations of torch, which it sees."""
    recorder = OperationRecorder()
    monkeypatch.setattr(graphs, "graph_recorder", lambda device: recorder)
    local = backends.LOCAL.with_operations(dropout={"keep_rows": keep_rows}, experts={"grouped_linear": masked_linear})
    monkeypatch.setattr(backends, "LOCAL", local)
    return recorder


def masked_product(rows: Tensor, weight: Tensor, groups: RowGroups, transposed: bool) -> Tensor:
    """`grouped_product` without counts on the host, as a GPU computes it."""
    of_rows = groups.of_rows(rows.shape[0])[:, None]
    products = [rows @ (matrix.t() if transposed else matrix) for matrix in weight]
    return torch.stack([(of_rows == number) * product for number, product in enumerate(products)]).sum(0)


def add_masked_product(
    total: Tensor, left: Tensor, right: Tensor, groups: RowGroups, factor: float = 1.0, replaces: bool = False
) -> None:
    of_rows = groups.of_rows(left.shape[0])[:, None]
    if replaces:
        total.zero_()
    for number, own in enumerate(total):
        own.addmm_((left * (of_rows == number)).t().to(total.dtype), right.to(total.dtype), alpha=factor)


masked_linear = functools.partial(grouped_linear, products=GroupedProducts(masked_product, add_masked_product))


@functools.cache
def eager(name: str) -> Outcome:
    return train(f"--mock-data --eval-iters 1 {RUNS[name]}")


@pytest.mark.parametrize("name", RUNS)
def test_graphs_give_the_bits_of_the_eager_run(name: str, recorder: OperationRecorder) -> None:
    expected = eager(name)
    found = train(f"--mock-data --eval-iters 1 {RUNS[name]} {GRAPHS}")
    assert recorder.captured and recorder.replayed
    assert expected.losses[0] != expected.losses[-1]
    assert_equal(found, expected)


def assert_equal(found: Outcome, expected: Outcome) -> None:
    numbers = [
        [dataclasses.replace(step, memory=None, seconds_left=None) for step in outcome.steps]
        for outcome in (found, expected)
    ]
    assert numbers[0] == numbers[1] and found.sample_ids == expected.sample_ids
    assert [line.losses for line in found.lines] == [line.losses for line in expected.lines]
    evaluated = [each.losses for each in expected.validations]
    assert evaluated and [each.losses for each in found.validations] == evaluated
    assert not differences(found.at_end, expected.at_end)


def test_a_graph_with_the_numbers_of_the_host_is_noticed(
    recorder: OperationRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: masks follow from the step at which the graph was captured."""
    expected = eager("gpt with dropout")

    def frozen(seed: int, iteration: Any, first: Any) -> RngPosition:
        return RngPosition(seed, int(iteration), int(first))

    monkeypatch.setattr("megatron.core.pipeline_parallel.captured_micro_batch.RngPosition", frozen)
    found = train(f"--mock-data --eval-iters 1 {RUNS['gpt with dropout']} {GRAPHS}")
    assert found.losses[-1] != expected.losses[-1]


OVERLAPPED = (
    f"--mock-data --train-iters 3 {NO_DROPOUT} --global-batch-size 6 --eval-iters 0 --overlap-grad-reduce "
    "--use-distributed-optimizer --overlap-param-gather"
)


def train_both_ways() -> tuple[Outcome, Outcome, int]:
    expected, recorder = train(OVERLAPPED), OperationRecorder()
    with mock.patch.object(graphs, "graph_recorder", lambda device: recorder):
        return train(f"{OVERLAPPED} {GRAPHS}"), expected, recorder.replayed


def test_the_last_micro_batch_runs_by_itself_if_it_starts_reductions() -> None:
    for found, expected, replayed in run_on_ranks(train_both_ways, 2):
        assert replayed == 2 * 2, "two steps after the warm-up, of three micro-batches each"
        assert found.losses == expected.losses and not differences(found.at_end, expected.at_end)


def test_the_former_spelling_and_one_graph_for_all_micro_batches(recorder: OperationRecorder) -> None:
    train(f"--mock-data --train-iters 3 --num-layers 1 {NO_DROPOUT} --enable-cuda-graph --cuda-graph-warmup-steps 2")
    assert (recorder.warmed, recorder.captured, recorder.replayed) == (8, 1, 4)  # 4 micro-batches a step


def test_a_cpu_has_no_graphs_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert graphs.graph_recorder(torch.device("cpu")) is None
    run = f"--mock-data --train-iters 1 --num-layers 1 {NO_DROPOUT} --eval-iters 0"
    train(f"{run} --cuda-graph-impl local")
    printed = capsys.readouterr().out
    assert "--cuda-graph-impl local: has no effect on a CPU, which has no CUDA graphs" in printed


def changed(loss_or_step: str) -> Providers:
    """The providers of a GPT whose forward step does what a graph cannot hold."""

    def build(context: Context) -> ForwardStep:
        plain = pretrain_gpt.build_forward_step(context)

        def step(data: Any, model: Any) -> Any:
            if loss_or_step == "iteration":
                assert data.iteration >= 0
            if loss_or_step == "two batches":
                next(data)
            output, loss = plain(data, model)
            if loss_or_step == "waits":
                output.sum().item()
            if loss_or_step == "validates":
                get_rerun_state_machine().validate_result(output.detach().sum(), torch.isnan, "NaN")
            return output, loss

        return step

    return Providers(GPT.build_model, GPT.build_datasets, build)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("iteration", AttributeError, "the forward step reads `iteration` of its data iterator"),
        ("two batches", UserError, "the forward step draws 2 batches"),
        ("waits", UserError, "cannot be captured: .*waits for the device"),
        ("validates", UserError, "the loss function validates its results"),
    ],
)
def test_what_does_not_fit_into_a_graph_is_refused(
    kind: str, error: type[Exception], message: str, recorder: OperationRecorder
) -> None:
    run = f"--mock-data --train-iters 3 --num-layers 1 {NO_DROPOUT} --eval-iters 0 {GRAPHS}"
    with pytest.raises(error, match=message):
        train(run, changed(kind))
