"""benchmarks/measure_layout.py counts memory that is still in use, traffic by group, and a whole run on two ranks."""

import contextlib
import importlib.util
import io
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.processes import run_on_ranks

from megatron.core.communication.traffic import Traffic
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.training.config.settings import LaunchEnvironment

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "measure_layout.py"

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 2 --vocab-size 40 --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --position-embedding-type rope --tensor-model-parallel-size 2"
)


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_layout", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_memory_that_is_still_in_use_is_counted_once():
    older = torch.ones(1000)
    with tool().LiveStorages() as live:
        kept = older * 2
        _ = kept[10:20], older.view(10, 100)  # views of what is counted, and of what is older
        saved = (kept.requires_grad_() * 3).exp()  # exp keeps its result, which is ours anyway
        for _ in range(5):
            torch.ones(1 << 16) * 2
    assert live.nbytes == 4000 + 4000
    del saved
    assert live.nbytes == 4000


def test_groups_have_the_first_name_that_fits():
    module, grid = tool(), RankGrid(8, tensor=2, context=2)
    groups = ProcessGroupCollection.from_grid(grid, 0)
    traffic = [
        Traffic("all_reduce", torch.float32, 80, (0, 1)),
        Traffic("all_reduce", torch.float32, 20, (0, 1)),
        Traffic("all_gather", torch.bfloat16, 64, groups.ranks("dp_cp")),
        Traffic("send", torch.float32, 8, (0, 2)),
        Traffic("send", torch.float32, 8, (0, 7)),
    ]
    assert module.rows_of(traffic, groups) == [
        ["cp", "send", "float32", 1, 8, 8],
        ["dp_cp", "all_gather", "bfloat16", 1, 64, 48],
        ["pp", "send", "float32", 1, 8, 8],
        ["tp", "all_reduce", "float32", 2, 100, 100],
    ]


def _measure(flags: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tool().main(flags.split(), LaunchEnvironment(2, False))
    return printed.getvalue()


@pytest.mark.parametrize(("more", "per_layer"), [("", 2 * 2 * 2), ("--sequence-parallel", 0)])
def test_a_layer_sums_hidden_states_twice_forward_and_twice_backward(more, per_layer):
    text = run_on_ranks(_measure, 2, f"{RUN} {more}")[0]
    sums = [line for line in text.splitlines() if line.split()[:3] == ["tp", "all_reduce", "float32"]]
    hidden = 16 * 32 * 4
    calls, nbytes = (int(sums[0].split()[i].replace(",", "")) for i in (3, 5)) if sums else (0, 0)
    if per_layer:
        # two layers, two micro-batches: each two sums a direction; the embedding's, the head's, and the loss's columns
        assert nbytes >= 2 * 2 * 4 * hidden and calls >= 2 * 2 * 4
        assert "reduce_scatter" not in text
    else:
        scattered = next(line.split() for line in text.splitlines() if "reduce_scatter" in line)
        assert int(scattered[5].replace(",", "")) >= 2 * 2 * 4 * hidden
    assert "bytes per rank" in text
