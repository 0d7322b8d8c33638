"""benchmarks/layouts.py: the cells of several GPUs are valid, fit into memory and give both sides the same work."""

import pytest

from benchmarks import layouts, peak_memory
from benchmarks.bench import read_options
from benchmarks.layouts import BATCHES, cells_of_gpus, find_cell
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment

PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


@pytest.mark.slow_cases("MOE64/ep4", "LLAMA8B/tp4dp2", "MOE64/ep8")
@pytest.mark.parametrize("name", BATCHES)
def test_a_cell_fits_into_an_h200(name: str) -> None:
    config = peak_memory.configured(name)
    assert config.world_size == find_cell(name).layout.gpus in (4, 8)
    assert 0.2 < peak_memory.peak_memory(config) / peak_memory.H200 < 0.9


@pytest.mark.parametrize("name", [name for name in BATCHES if find_cell(name).reference == name])
def test_both_sides_have_the_same_batch(name: str) -> None:
    cell, ours = find_cell(name), peak_memory.configured(name)
    _, flags = read_options([cell.model, *cell.anchor.split()])
    anchor = configure(flags, launch_environment=LaunchEnvironment(cell.layout.gpus, has_cuda=True))
    for field in ("global_batch_size", "micro_batch_size"):
        assert getattr(anchor.training, field) == getattr(ours.training, field)
    for field in ("num_layers", "fp8", "fp8_recipe", "expert_model_parallel_size", *PARALLEL):
        assert getattr(anchor.transformer, field) == getattr(ours.transformer, field)
    assert anchor.data.seq_length == ours.data.seq_length


def test_cells_by_name() -> None:
    dense = ["dp4", "dp4-fp8", "zero3", "tp4", "tp2dp2", "pp4", "pp4-zbv", "pp4-8mb", "pp4-zbv-8mb", "cp4"]
    experts = ["", "-flex", "-overlap", "-flex-overlap"]
    assert [cell.name for cell in cells_of_gpus(4)] == [
        *(f"LLAMA8B/{name}" for name in dense),
        *(f"MOE64/ep4{way}" for way in experts),
    ]
    assert [cell.name for cell in cells_of_gpus(8)][:4] == [f"LLAMA8B/{n}" for n in ("hsdp", "tp4dp2", "pp4tp2", "cp8")]
    assert find_cell("LLAMA8B/pp4-zbv-8mb").reference == "LLAMA8B/pp4-8mb"
    assert find_cell("LLAMA8B/zero3").reference == "LLAMA8B/dp4"
    with pytest.raises(ValueError, match="no layout dp3; there are graphs, dp2"):
        find_cell("LLAMA8B/dp3")


def test_a_budget_is_planned() -> None:
    cells = cells_of_gpus(4)
    dp4, pp4, zbv = (find_cell(f"LLAMA8B/{name}") for name in ("dp4", "pp4", "pp4-zbv"))
    pair = layouts.pair_seconds(dp4, 8, 8)
    assert layouts.planned(cells, pair - 1, 8, 8)[0].name != "LLAMA8B/dp4"  # a shorter one is
    both = layouts.pair_seconds(pp4, 8, 8) + layouts.pair_seconds(zbv, 8, 8, with_anchor=False)
    assert layouts.planned([pp4, zbv], both, 8, 8) == [pp4, zbv]
    assert layouts.planned([pp4, zbv], both - 1, 8, 8) == [pp4]
    measured = [{"cell": "LLAMA8B", "layout": "dp4", "ours": {"timeline": {"step": 1.0}}}]
    measured += [{"cell": "LLAMA8B", "layout": "tp4", "ours": {}}]
    assert layouts.missing(cells, measured) == cells[1:]
