"""The complete settings of a run."""

from support.command_lines import configured

from megatron.core.groups.rank_grid import DEFAULT_ORDER


def test_the_grid_follows_from_the_sizes() -> None:
    config = configured("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", ranks=8)
    assert (config.grid.tensor, config.grid.pipeline, config.grid.data, config.grid.order) == (2, 2, 2, DEFAULT_ORDER)
    mapped = configured("--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping", ranks=4)
    assert mapped.grid.order == "tp-cp-ep-pp-dp"


def test_shortcuts_are_values_of_the_parts() -> None:
    config = configured("--seed 7")
    assert config.seed == 7 == config.transformer.seed and config.transformer is config.model.transformer
    assert config.world_size == config.parallel.world_size == 1


def test_the_first_part_with_a_field_owns_it() -> None:
    config = configured("--bf16")
    flat = config.flat()
    assert flat["params_dtype"] is config.transformer.params_dtype and "transformer" not in flat
    assert flat["eval_iters"] == config.evaluation.eval_iters
