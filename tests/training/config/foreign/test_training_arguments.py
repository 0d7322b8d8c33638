"""TrainingArguments of Transformers as flags."""

import dataclasses
from types import SimpleNamespace

import pytest

from megatron.training.config.foreign.training_arguments import TRAINING_ARGUMENTS, read_training_arguments


def values(samples: int | None = 100, ranks: int = 1, **given: object) -> dict[str, object]:
    reading = read_training_arguments(SimpleNamespace(**given), samples, ranks)
    assert not reading.problems
    return {one.field: one.value for one in reading.settings}


def test_every_field_of_the_installed_class_has_an_answer() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert fields - TRAINING_ARGUMENTS.keys() == set()
    assert TRAINING_ARGUMENTS.keys() - fields == set()


def test_the_defaults_of_the_installed_class_ask_for_nothing_strange() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    reading = read_training_arguments(transformers.TrainingArguments("out", use_cpu=False), 100, 1)
    assert not reading.problems and not reading.lines()
    found = {one.field: one.value for one in reading.settings}
    assert found["lr"] == 5e-5 and found["train_iters"] == 38 and found["calculate_per_token_loss"] is True


def test_settings_that_several_flags_say() -> None:
    found = values(
        gradient_checkpointing=True, report_to=["tensorboard", "wandb"], output_dir="o", run_name="r", ddp_timeout=90,
        eval_strategy="epoch", per_device_train_batch_size=4, lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, learning_rate=1e-3, warmup_steps=7, ranks=5,
    )  # fmt: skip
    assert found["recompute_granularity"] == "full" and found["tensorboard_dir"] == "o/runs"
    assert (found["wandb_project"], found["wandb_exp_name"]) == ("huggingface", "r")
    assert found["distributed_timeout_minutes"] == 2 and found["eval_interval"] == 5 and found["train_iters"] == 15
    assert found["min_lr"] == pytest.approx(1e-4) and found["lr_warmup_iters"] == 7


def test_other_configs_are_read_by_their_readers() -> None:
    found = values(deepspeed={"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"})
    assert found["data_parallel_sharding_strategy"] == "optim_grads"
    found = values(fsdp="full_shard auto_wrap offload", fsdp_config={"min_num_params": 0})
    assert found["data_parallel_sharding_strategy"] == "optim_grads_params" and found["optimizer_cpu_offload"] is True
    found = values(fsdp=True, fsdp_config={"fsdp_version": 2, "reshard_after_forward": False})
    assert found["data_parallel_sharding_strategy"] == "optim_grads"
    assert values(parallelism_config={"tp_size": 2, "cp_size": 1})["tensor_model_parallel_size"] == 2


def test_without_a_length_of_the_data_steps_must_be_given() -> None:
    reading = read_training_arguments(SimpleNamespace(num_train_epochs=2), None, 1)
    assert reading.problems == [
        "TrainingArguments: max_steps: the data has no length here, so give the number of steps"
    ]
    assert values(None, max_steps=3)["train_iters"] == 3


def test_mistakes_of_values_are_lines() -> None:
    reading = read_training_arguments(
        SimpleNamespace(per_device_train_batch_size=0, max_steps="many", optim="adamw_torch_8bit", fsdp=2.5), 7, 1
    )
    found = [problem.split(":")[1] for problem in reading.problems]
    assert found == [" max_steps many", " optim adamw_torch_8bit", " fsdp"]
