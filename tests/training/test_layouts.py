"""Whole runs from flags in many layouts: each equals the run of one process."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from support.launch import launch
from support.runs import TINY, Outcome, logger_of, state_at_end, state_at_start, stream, train, train_all_on_ranks
from torch import Tensor

from megatron.training.log.jsonl import read_metrics

BASE = f"{TINY} --num-layers 4 --num-attention-heads 4"
RUN = "--fp64 --train-iters 2 --eval-interval 1 --eval-iters 1 --lr-warmup-iters 1"
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss --calculate-per-token-loss --balanced-packing"

TP2, PP2, CP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
SHARDED = "--use-distributed-optimizer"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"

VPP = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
LAYOUTS = {
    "tensor": {"TP": TP2, "TP with SP": f"{TP2} --sequence-parallel"},
    "pipeline": {
        "PP": PP2,
        "VPP": VPP,
        "uneven": f"{PP2} --decoder-first-pipeline-num-layers 1",
        "by layout": f"{PP2} --pipeline-model-parallel-layout E|ttt|t|L",
        "auto": f"{PP2} --pipeline-model-parallel-layout auto",
    },
    "zero bubble": {
        "zb-h1": f"{PP2} --pipeline-schedule zb-h1",
        "zb-v": f"{PP2} --pipeline-schedule zb-v",
    },
    "context": {
        "CP": CP2,
        "CP by heads": f"{CP2} --cp-comm-type a2a",
    },
    "data": {
        "DP": "",
        "ZeRO-1": SHARDED,
        "ZeRO-1 overlapped": f"{SHARDED} --overlap-grad-reduce --overlap-param-gather",
        "ZeRO-2": f"{FSDP} optim_grads",
        "ZeRO-3": f"{FSDP} optim_grads_params",
        "ZeRO-3 as torch calls it": "--use-torch-fsdp2",
    },
}
"""Layouts of two ranks, by dimension."""
QUICK = ["TP with SP", "VPP", "zb-v", "CP by heads", "ZeRO-1 overlapped", "ZeRO-3"]
"""Layouts of two ranks in `make test`: the flags of each dimension. tests/parity tests the layouts themselves."""
LAYOUTS_OF_FOUR = {
    "TP x PP": f"{TP2} --sequence-parallel {PP2} {SHARDED}",
    "PP x CP, sharded": f"{PP2} {CP2} {SHARDED} --overlap-grad-reduce",
    "zb-v x ZeRO-1": f"{PP2} --pipeline-schedule zb-v {SHARDED}",
    "TP x ZeRO-3": f"{TP2} {FSDP} optim_grads_params",
    "PP x ZeRO-3": f"{PP2} {FSDP} optim_grads_params",
    "VPP x DP, stages first": f"{VPP} --use-tp-pp-dp-mapping",
    "a rank without anything": "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ett||tt|L",
    "hybrid": f"{SHARDED} --num-distributed-optimizer-instances 2",
}


def norms(outcome: Outcome) -> list[float]:
    return [step.grad_norm for step in outcome.steps if step.grad_norm is not None]


def evaluations(outcome: Outcome) -> list[tuple[str, int, int | None]]:
    return [(record.split, record.iteration, record.tokens) for record in outcome.validations]


def check_same_run(ranks: list[Outcome], alone: Outcome) -> None:
    """Asserts that a run's results, random numbers and log do not depend on the layout."""
    seen = logger_of(ranks)
    assert stream(ranks) == stream([alone])
    start = state_at_start([alone])
    found = state_at_start(ranks)
    assert found.keys() == start.keys() and all(torch.equal(found[name], start[name]) for name in start)
    assert seen.losses == pytest.approx(alone.losses, abs=1e-11)
    assert norms(seen) == pytest.approx(norms(alone), rel=1e-11) and len(norms(seen)) == len(alone.steps)
    assert evaluations(seen) == evaluations(alone)
    for record, expected in zip(seen.validations, alone.validations, strict=True):
        assert record.losses == pytest.approx(expected.losses, abs=1e-11)
    end, expected = state_at_end(ranks), state_at_end([alone])
    assert end.keys() == expected.keys()
    assert max(float((end[name] - expected[name]).abs().max()) for name in end) < 1e-9
    for rank in ranks:
        assert facts(rank) == facts(alone)


def facts(outcome: Outcome) -> dict[str, Any]:
    """Counts, place in the schedule, updates made. Operations are counted with the rows that pad the vocabulary, whose
    number goes by tensor parallel ranks."""
    found = {name: dict(outcome.at_end[name]) for name in ("state", "scheduler", "optimizer")}
    del found["state"]["floating_point_operations_so_far"]
    return found


@pytest.fixture(scope="module")
def expected(corpus) -> list[Outcome]:
    """One process, with whole samples and with packed documents."""
    return [train(f"{RUN} --data-path {corpus} {masks}", base=BASE) for masks in ("", DOCUMENTS)]


def test_layouts_give_the_run_of_one_process(corpus, expected):
    """Each with whole samples, or with packed documents, in turn."""
    layouts = {name: flags for dimension in LAYOUTS.values() for name, flags in dimension.items() if name in QUICK}
    assert list(layouts) == QUICK
    check_layouts(corpus, expected, layouts, 2, both=False)


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [*LAYOUTS, "together"])
def test_every_layout_with_whole_samples_and_with_documents(corpus, expected, dimension):
    world_size = 4 if dimension == "together" else 2
    check_layouts(corpus, expected, LAYOUTS.get(dimension, LAYOUTS_OF_FOUR), world_size, both=True)


def check_layouts(
    corpus: str, expected: Sequence[Outcome], layouts: Mapping[str, str], world_size: int, both: bool
) -> None:
    """Runs all layouts in one pool of processes, one after the other."""
    kinds = [(name, number % 2) for number, name in enumerate(layouts)]
    kinds += [(name, 1 - kind) for name, kind in kinds] if both else []
    runs = [f"{RUN} --data-path {corpus} {layouts[name]} {('', DOCUMENTS)[kind]}" for name, kind in kinds]
    by_rank = train_all_on_ranks(runs, world_size, base=BASE)
    failed = []
    for number, (name, kind) in enumerate(kinds):
        try:
            check_same_run([outcomes[number] for outcomes in by_rank], expected[kind])
        except AssertionError as error:
            failed.append(f"{name}{' with documents' * kind}: {error}")
    assert not failed, "\n\n".join(failed)


# ---------------------------------------------------------------------------------------------------------------------
# That a layout is in effect at all

SPREADS = {
    # Parts of the weights, and of the optimizer's state, that the rank of two holds that has more of them.
    "TP": (0.5, 0.5),
    "VPP": (0.5, 0.5),
    "CP": (1, 1),
    "ZeRO-1": (1, 0.5),
    "ZeRO-2": (1, 0.5),
    "ZeRO-3": (0.5, 0.5),
}


def test_what_each_layout_spreads_over_its_ranks(corpus):
    flags = f"--data-path {corpus} --train-iters 1 --eval-iters 0 --untie-embeddings-and-output-weights"
    layouts = {name: layout for dimension in LAYOUTS.values() for name, layout in dimension.items()}
    by_rank = train_all_on_ranks([f"{flags} {layouts[name]}" for name in SPREADS], 2, base=BASE)
    for number, (name, expected) in enumerate(SPREADS.items()):
        ranks = [outcomes[number] for outcomes in by_rank]
        whole = elements((key, tensor) for key, tensor in state_at_end(ranks).items())
        held = [
            elements((tensor_slice.name, tensor_slice.values) for tensor_slice in rank.slices_at_end) for rank in ranks
        ]
        parts = [max(rank[kind] for rank in held) / whole[kind] for kind in (0, 1)]
        assert all(part <= found < part + 0.1 for part, found in zip(expected, parts, strict=True)), (name, parts)


def elements(tensors: Iterable[tuple[str, Tensor]]) -> tuple[int, int]:
    """Counts the elements of weights, and those of the optimizer's state."""
    counts = [0, 0]
    for name, tensor in tensors:
        counts[name.startswith("optimizer.")] += tensor.numel()
    return counts[0], counts[1]


# ---------------------------------------------------------------------------------------------------------------------
# What is printed


@pytest.mark.fast("--pipeline-model-parallel-size 2-2-1")
@pytest.mark.parametrize(
    ("layout", "world_size", "logger"),
    [
        (PP2, 2, 1),
        (f"{PP2} --pipeline-schedule zb-v", 2, 0),
        pytest.param(f"{TP2} --sequence-parallel {PP2}", 4, 3, marks=pytest.mark.slow),
    ],
)
def test_one_process_prints_the_lines_of_one_process(corpus, tmp_path, layout, world_size, logger):
    """Started as torchrun does it: iterations, evaluations and the exit are printed once, with the same numbers."""
    flags = f"--data-path {corpus} --train-iters 3 --eval-interval 2 --eval-iters 1 --log-interval 1 --exit-interval 3"
    flags += f" --fp64 --metrics-path {tmp_path}/all.jsonl --log-throughput --log-params-norm --log-num-zeros-in-grad"
    # Rows of tokens that are not met have no gradient. A key's bias changes no probability: of its gradient rounding
    # alone is left, and how many of its elements are exactly zero is chance.
    flags += " --untie-embeddings-and-output-weights --disable-bias-linear"
    program = launch(f"{flags} {layout}", world_size, tmp_path / "ranks", base=BASE)
    assert program.exit_codes() == [0] * world_size, "".join(map(program.output, range(world_size)))
    alone = launch(flags.replace("all.jsonl", "alone.jsonl"), 0, tmp_path / "alone", base=BASE)
    assert alone.exit_codes() == [0]
    assert told(program.output(logger)) == told(alone.output(0)) and len(told(alone.output(0))) == 5
    assert "num zeros: 0" not in alone.output(0)
    for rank in range(world_size):
        assert rank == logger or told(program.output(rank)) == []
        assert program.output(rank).count("padded vocab") == (rank == 0)
    together = "".join(map(program.output, range(world_size)))
    assert together.count("backend local") == 1 and set(layers_told_of(together)) == {1, 2, 3, 4}
    lines, expected = read_metrics(tmp_path / "all.jsonl"), read_metrics(tmp_path / "alone.jsonl")
    for key in ("lm loss", "grad norm", "params norm", "learning rate", "consumed samples", "tokens"):
        (iterations, values), (_, wanted) = lines.series(key), expected.series(key)
        assert iterations == [1, 2, 3] and values == pytest.approx(wanted, rel=1e-11), key
    assert [line["evaluated tokens"] for line in lines.validation] == [64]


def told(output: str) -> list[str]:
    """The lines of iterations, evaluations and the exit, without times and speeds."""
    lines = [line for line in output.splitlines() if re.search(r"iteration .*\||exiting program", line)]
    return [re.sub(r"^ \[.*?\]|elapsed time[^|]*\||throughput[^|]*\|", "", line) for line in lines]


def layers_told_of(output: str) -> list[int]:
    """Layers whose kernels are named."""
    found = re.findall(r"attention of layers? (\d+)(?: to (\d+))? on", output)
    return [number for first, last in found for number in range(int(first), int(last or first) + 1)]
