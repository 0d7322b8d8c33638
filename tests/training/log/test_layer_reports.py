"""What layers report reaches the log line and the files, the same under every layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.runs import logger_of, train, train_on_ranks
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.transformer.layer_metrics import LayerMetrics
from megatron.training.log.console_line import format_line
from megatron.training.log.jsonl import read_metrics
from megatron.training.log.layer_reports import LayerNumbers, LayerReports, load_numbers
from megatron.training.providers import Providers

EXPERTS = (
    "--mock-data --train-iters 4 --log-interval 2 --fp64 --layout-invariant --num-layers 4 --swiglu "
    "--disable-bias-linear --num-experts 4 --moe-layer-freq [0,1,1,0] --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01 0.02 --moe-z-loss-coeff 0.001 "
    "--moe-expert-capacity-factor 1.0 --moe-per-layer-logging --moe-token-dispatcher-type alltoall"
)
LAYOUTS = {
    "PP2": "--pipeline-model-parallel-size 2",
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
    "EP2": "--expert-model-parallel-size 2",
    "CP2": "--context-parallel-size 2",
}
QUICK, SLOW = ["PP2", "TP2"], ["EP2", "CP2"]
LOSSES = ["load_balancing_loss", "seq_load_balancing_loss", "z_loss"]


class Layer(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.metrics = LayerMetrics(layer)


def one_process() -> ProcessGroupCollection:
    return ProcessGroupCollection.from_grid(RankGrid(1), 0)


def counts(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_numbers_are_means_over_what_was_added() -> None:
    model = nn.ModuleList([Layer(2), Layer(5)])
    reports = LayerReports([model], one_process(), torch.device("cpu"))
    for value in (1.0, 3.0):
        model[0].metrics.add("z_loss", torch.tensor(value), 1)
        model[0].metrics.add_load(counts(value, 1, 0, 0))
    model[1].metrics.add("z_loss", torch.tensor(10.0), 2)
    now, line = reports.collect(reset=False)
    assert now == line
    load = load_numbers([4.0, 2.0, 0.0, 0.0])
    assert now.by_layer == {
        ("moe_load_entropy", 2): load["entropy"],
        ("moe_load_max", 2): load["max"],
        ("z_loss", 2): 2.0,
        ("z_loss", 5): 5.0,
    }
    assert now.means()["z_loss"] == 3.5
    assert now.line() == {"z_loss": 3.5}
    assert now.tags(per_layer=False) == now.means()
    assert now.tags(per_layer=True)["moe/z_loss_layer_4"] == 5.0


def test_a_save_between_two_lines_loses_nothing() -> None:
    model = nn.ModuleList([Layer(1)])
    reports = LayerReports([model], one_process(), torch.device("cpu"))
    model[0].metrics.add("z_loss", torch.tensor(1.0), 1)
    reports.collect(reset=False)
    model[0].metrics.add("z_loss", torch.tensor(4.0), 2)
    now, line = reports.collect(reset=True)
    assert (now.line(), line.line()) == ({"z_loss": 2.0}, {"z_loss": 5 / 3})
    assert reports.collect(reset=True) == (LayerNumbers(), LayerNumbers())


@pytest.mark.parametrize(
    ("tokens", "fullest", "entropy"),
    [
        ([2.0, 2.0, 2.0, 2.0], 1.0, 1.0),
        ([8.0, 0.0, 0.0, 0.0], 4.0, 0.0),
        ([1.0, 1.0, 0.0, 0.0], 2.0, math.log(2) / math.log(4)),
        ([5.0], 1.0, 1.0),
        ([0.0, 0.0], 0.0, 0.0),
    ],
)
def test_of_loads_the_fullest_and_the_entropy(tokens: list[float], fullest: float, entropy: float) -> None:
    assert load_numbers(tokens) == pytest.approx({"max": fullest, "entropy": entropy})


def test_a_run_prints_and_writes_them(tmp_path: Path) -> None:
    outcome = train(f"{EXPERTS} --metrics-path {tmp_path}/metrics.jsonl")
    line = outcome.lines[-1]
    assert list(line.losses) == ["lm loss", "load_balancing_loss", "moe_dropped", *LOSSES[1:]]
    assert f"| seq_load_balancing_loss: {line.losses['seq_load_balancing_loss']:.6E} |" in format_line(line)
    last = read_metrics(tmp_path / "metrics.jsonl").training[-1]
    for name in (*LOSSES, "moe_load_max", "moe_load_entropy", "moe_dropped"):
        by_layer = [last[f"moe/{name}_layer_{layer}"] for layer in (1, 2)]
        assert last[name] == pytest.approx(sum(by_layer) / 2) and by_layer[0] != by_layer[1]
        assert f"moe/{name}_layer_0" not in last
    assert last["load_balancing_loss"] >= 1.0 and last["moe_load_max"] > 1.0
    assert 0.0 < last["moe_dropped"] < 1.0 and 0.5 < last["moe_load_entropy"] <= 1.0


@pytest.fixture(scope="module")
def alone() -> Any:
    return train(EXPERTS.replace("--moe-per-layer-logging", ""))


def test_without_the_flag_layers_are_not_told_apart(alone: Any) -> None:
    reported = alone.steps[-1].reported
    assert "z_loss" in reported and not any(name.startswith("moe/") for name in reported)


@pytest.mark.fast("PP2")
@pytest.mark.parametrize("layout", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_layout_does_not_change_them(alone: Any, layout: str) -> None:
    outcome = logger_of(train_on_ranks(f"{EXPERTS} {LAYOUTS[layout]}", 2))
    assert len(outcome.lines) == len(alone.lines) == 3
    for line, expected in zip(outcome.lines, alone.lines, strict=True):
        assert line.losses == pytest.approx(expected.losses, rel=1e-9)
    for step, expected in zip(outcome.steps, alone.steps, strict=True):
        found = {name: value for name, value in step.reported.items() if not name.startswith("moe/")}
        assert found == pytest.approx(expected.reported, rel=1e-9)
    assert outcome.steps[-1].reported


def measured_model(context: Any, stage: Any) -> Any:
    """A dense GPT whose MLPs report a value of their own, as the script of docs/extending.md does."""
    model = pretrain_gpt.build_model(context, stage)
    for layer in model.decoder.layers:
        layer.mlp.metrics = LayerMetrics(layer.layer_number)
        layer.mlp.register_forward_hook(
            lambda mlp, inputs, output: mlp.metrics.add("mlp_norm", output[0].norm() * mlp.metrics.layer, 1)
        )
    return model


def test_modules_of_a_script_report_from_all_stages() -> None:
    flags = "--mock-data --train-iters 2 --log-interval 1 --fp64 --layout-invariant"
    providers = Providers(measured_model, pretrain_gpt.build_datasets, pretrain_gpt.build_forward_step)
    alone = train(flags, providers)
    outcome = logger_of(run_on_ranks(train, 2, f"{flags} --pipeline-model-parallel-size 2", providers))
    for line, expected in zip(outcome.lines, alone.lines, strict=True):
        assert expected.losses["mlp_norm"] > 0.0
        assert line.losses == pytest.approx(expected.losses, rel=1e-9)
