"""NeMo's recipes of pretraining."""

from typing import Any

import pytest
from support.runs import Outcome, remembered

from megatron.core.exceptions import UserError
from megatron.facades.nemo import llm, run
from megatron.facades.nemo.lightning.flags import Flags
from megatron.facades.nemo.llm import recipes


def test_names_are_those_of_nemos_modules() -> None:
    assert {"llama3_8b", "llama31_405b", "mixtral_8x7b", "gpt3_175b", "qwen2_1p5b", "nemotron4_15b"} <= set(
        recipes.RECIPES
    )
    assert llm.llama3_8b is recipes.llama3_8b and isinstance(llm.llama3_8b.model().make(), llm.LlamaModel)
    with pytest.raises(AttributeError, match="llama9_8b: the recipes are gpt3_126m, "):
        print(recipes.llama9_8b)
    with pytest.raises(UserError, match=r"finetune_recipe: .*--lora-rank"):
        llm.llama3_8b.finetune_recipe()


def test_arguments_of_a_recipe() -> None:
    made = llm.llama3_70b.pretrain_recipe(
        "runs", "trial", 4, 8, tensor_parallelism=4, sequence_parallelism=True, performance_mode=True, fn=dict
    )()
    assert (made["trainer"].devices, made["trainer"].num_nodes, made["data"].seq_length) == (8, 4, 8192)
    assert made["optim"].config.lr == 1.5e-4 and made["optim"].lr_scheduler.min_lr == pytest.approx(1.5e-5)
    assert str(made["log"].folder) == "runs/trial" and made["resume"].resume_if_exists
    flags = Flags()
    for part in (made["trainer"].strategy, *made["trainer"].callbacks):
        part.give_flags(flags)
    expected = {"tensor_model_parallel_size": 4, "tp_comm_overlap": True, "overlap_grad_reduce": True}
    assert flags.values.items() >= (expected | {"manual_gc": True, "manual_gc_interval": 100}).items()
    assert not flags.problems


@pytest.mark.parametrize(
    ("plugin", "format"), [(recipes.bf16_mixed, None), (recipes.bf16_with_fp8_mixed, "hybrid")], ids=["bf16", "fp8"]
)
def test_precisions(plugin: Any, format: str | None) -> None:
    flags = Flags()
    plugin().make().give_flags(flags)
    assert flags.values["bf16"] is True and flags.values.get("fp8") == format


def test_a_small_copy_of_a_recipe_trains_and_resumes(tmp_path: Any) -> None:
    recipe = llm.llama3_8b.pretrain_recipe(
        str(tmp_path), num_gpus_per_node=1, precision="32", global_batch_size=2, seq_length=16, warmup_steps=1
    )
    for name, value in {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2}.items():
        setattr(recipe.model.config, name, value)
    recipe.model.config.num_query_groups = 1
    recipe.model.config.vocab_size = 50
    recipe.data.num_workers = 0
    recipe.trainer.accelerator, recipe.trainer.log_every_n_steps = "cpu", 1
    recipe.trainer.limit_val_batches = recipe.trainer.val_check_interval = 2
    recipe.log.ckpt.every_n_train_steps, recipe.optim.lr_scheduler.max_steps = 2, 4
    losses = []
    for recipe.trainer.max_steps in (2, 4):
        outcome = Outcome()
        with remembered(outcome, lambda run: None):
            folder = run.run(recipe)
        losses.append(len(outcome.losses))
    assert losses == [2, 2] and (folder / "checkpoints/iter_0000004").is_dir()
