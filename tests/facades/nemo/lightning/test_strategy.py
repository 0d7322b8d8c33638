"""What the arguments of NeMo's and Lightning's objects become: flags, notes and refusals."""

import datetime
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.nemo_runs import gpt
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.facades.nemo import lightning as nl
from megatron.facades.nemo import llm
from megatron.facades.nemo.lightning import lr_scheduler, precision, run_callbacks, strategy, trainer
from megatron.facades.nemo.lightning.arguments import Argument, ArgumentValues
from megatron.facades.nemo.lightning.data import StageData, data_parallel_size
from megatron.facades.nemo.lightning.flags import Flags, words_of
from megatron.facades.nemo.lightning.folders import give_ckpt_path, give_saving
from megatron.facades.nemo.lightning.model_flags import give_model, give_transformer
from megatron.facades.nemo.lightning.trainer_flags import give_trainer, minutes_of
from megatron.training.config.flag_table import flag_table


def flags_of(give: Callable[[Flags], object]) -> Flags:
    flags = Flags()
    give(flags)
    return flags


# ---------------------------------------------------------------------------------------------------------------------
# Tables


_OF_CALLBACKS = [each.table for each in run_callbacks.RunCallback.__subclasses__()]


@pytest.mark.parametrize("table", [strategy.ARGUMENTS, precision.ARGUMENTS, trainer.ARGUMENTS, *_OF_CALLBACKS])
def test_every_row_names_a_field_or_says_one_thing(table: list[Argument]) -> None:
    for row in table:
        assert row.field is None or row.field in flag_table(), row
        assert sum(each is not None for each in (row.field, row.note, row.refusal)) <= 1, row


def test_the_strategy_has_nemos_arguments_in_nemos_order() -> None:
    names = [*inspect.signature(nl.MegatronStrategy.give_flags).parameters]
    assert names == ["self", "flags"]
    names = [row.name for row in strategy.ARGUMENTS]
    assert len(names) == 52 and names[:2] == ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    assert names[-2:] == ["use_gloo_process_groups", "flags"] and len(set(names)) == 52
    assert nl.MegatronStrategy(2, 4).pipeline_model_parallel_size == 4


class Described(ArgumentValues):
    table = (Argument("size", 1, "seed"), Argument("idle", 0, note="why"), Argument("wrong", None, refusal="do this"))


def test_an_unknown_argument_names_the_class_and_the_nearest_argument() -> None:
    with pytest.raises(TypeError, match=r"Trainer\(\): .*'max_stepz'; did you mean max_steps\?"):
        nl.Trainer(max_stepz=3)
    with pytest.raises(TypeError, match=r"MockDataModule\(\): .*'seq_len'; did you mean seq_length\?"):
        llm.MockDataModule(seq_len=3)
    with pytest.raises(TypeError, match=r"Described\(\): too many positional arguments$"):
        Described(1, 2, 3, 4)


def test_a_value_becomes_a_flag_a_note_or_a_problem() -> None:
    assert vars(flags_of(Described().give_flags)) == {
        "values": {"seed": 1},
        "accepted": [],
        "notes": [],
        "problems": [],
    }
    flags = flags_of(Described(3, idle=2, wrong=nn.ReLU()).give_flags)
    assert flags.values == {"seed": 3} and flags.notes == ["Described(idle=2) has no effect: why"]
    assert flags.problems == ["Described(wrong=<ReLU>): do this"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
        Described(more=1)


def test_words_set_a_field() -> None:
    assert words_of("tensor_model_parallel_size", 2) == ["--tensor-model-parallel-size", "2"]
    assert words_of("tensor_model_parallel_size", 1) == []
    assert words_of("bf16", True) == ["--bf16"] and words_of("bf16", False) == []
    assert words_of("bias_gelu_fusion", False) == ["--no-bias-gelu-fusion"]
    assert words_of("data_path", ["0.3", "a", "0.7", "b"]) == ["--data-path", "0.3", "a", "0.7", "b"]


# ---------------------------------------------------------------------------------------------------------------------
# Strategy and precision


def test_keywords_of_older_scripts() -> None:
    given = nl.MegatronStrategy(gradient_as_bucket_view=True, ckpt_include_optimizer=False, tensor_model_paralel_size=2)
    flags = flags_of(given.give_flags)
    assert flags.notes == [
        "MegatronStrategy(gradient_as_bucket_view=...) has no effect: gradients always lie in buckets"
    ]
    assert flags.values["no_save_optim"] is True
    (problem,) = flags.problems
    assert problem.endswith(
        "(tensor_model_paralel_size=...): there is no such argument; did you mean tensor_model_parallel_size?"
    )


def test_a_strategy_gives_the_layout() -> None:
    given = nl.MegatronStrategy(
        virtual_pipeline_model_parallel_size=2,
        ckpt_load_optimizer=False,
        ckpt_load_strictness=SimpleNamespace(value="log_all"),
        ddp=DistributedDataParallelConfig(overlap_grad_reduce=True),
        fsdp="megatron",
        megatron_log_level=10,
        use_te_rng_tracker=True,
        restore_config=nl.RestoreConfig("weights"),
    )
    flags = flags_of(given.give_flags)
    expected = {
        "num_virtual_stages_per_pipeline_rank": 2,
        "no_load_optim": True,
        "dist_ckpt_strictness": "log_all",
        "overlap_grad_reduce": True,
        "use_megatron_fsdp": True,
        "logging_level": 10,
        "pretrained_checkpoint": "weights",
    }
    assert not flags.problems and flags.values.items() >= expected.items()
    assert "use_te_rng_tracker=True) has no effect" in flags.notes[0]


def test_a_strategy_refuses_what_it_cannot_do() -> None:
    given = nl.MegatronStrategy(fsdp="pytorch", use_sharp=True, pipeline_dtype=torch.float16, static_graph=True)
    flags = flags_of(given.give_flags)
    given.check_pipeline_dtype(flags, torch.bfloat16)
    starts = ["use_sharp=True", "static_graph=...", "fsdp='pytorch'", "pipeline_dtype=torch.float16"]
    assert [problem.partition(")")[0] for problem in flags.problems] == [f"MegatronStrategy({each}" for each in starts]


def test_precision_gives_types_fp8_and_the_loss_scale() -> None:
    half = flags_of(nl.MegatronMixedPrecision("16-mixed", fp16_hysteresis=3).give_flags)
    assert half.values["fp16"] is True and half.values["hysteresis"] == 3 and half.values["bf16"] is False
    eight = flags_of(nl.MegatronMixedPrecision("bf16-mixed", fp8="hybrid", fp8_params=True).give_flags)
    assert eight.values.items() >= {"bf16": True, "fp8": "hybrid", "fp8_param_gather": True}.items()
    full = flags_of(nl.MegatronMixedPrecision("32").give_flags)
    assert full.values == {"bf16": False, "fp16": False} and not full.problems
    wrong = nl.MegatronMixedPrecision("8", fp8_dot_product_attention=True, params_dtype=torch.float16)
    words = ["fp8_dot_product_attention=True", "precision='8'", "params_dtype=torch.float16"]
    for word, problem in zip(words, flags_of(wrong.give_flags).problems, strict=True):
        assert word in problem


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer, schedule, model


def test_an_optimizer_gives_what_differs_from_its_defaults() -> None:
    schedule = lr_scheduler.CosineAnnealingScheduler(max_steps=20, warmup_steps=3, constant_steps=5, min_lr=1e-5)
    config = OptimizerConfig(optimizer="adam", lr=0.1, adam_beta2=0.95, use_distributed_optimizer=True)
    flags = flags_of(nl.MegatronOptimizerModule(config, schedule).give_flags)
    optimizer = {"lr": 0.1, "adam_beta2": 0.95, "use_distributed_optimizer": True}
    shape = {"lr_decay_style": "cosine", "lr_decay_iters": 15, "lr_warmup_iters": 3, "min_lr": 1e-5}
    assert flags.values == optimizer | shape


def test_schedules_that_exist_and_others() -> None:
    flags = Flags()
    flags.give("train_iters", 50)
    lr_scheduler.WarmupAnnealingScheduler(warmup_ratio=0.1).give_flags(flags)
    expected = {"lr_decay_style": "linear", "lr_decay_iters": 50, "lr_warmup_fraction": 0.1}
    assert flags.values.items() >= expected.items()
    refused = [getattr(lr_scheduler, name) for name in lr_scheduler.REFUSED]
    assert all("give CosineAnnealing" in flags_of(each(power=2).give_flags).problems[0] for each in refused)
    other = nl.MegatronOptimizerModule("adam", lr_mult=2.0)
    assert [problem.partition(":")[0] for problem in flags_of(other.give_flags).problems] == [
        "MegatronOptimizerModule(lr_mult=2.0)",
        "MegatronOptimizerModule(config='adam')",
    ]
    assert "give a schedule" in flags_of(nl.MegatronOptimizerModule(OptimizerConfig(), 3).give_flags).problems[0]


def test_a_transformer_config_becomes_flags() -> None:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=1,
        bf16=True,
    )
    expected = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "add_bias_linear": False,
        "swiglu": True,
        "ffn_hidden_size": 32,
        "kv_channels": 2,
        "group_query_attention": True,
        "num_query_groups": 2,
    }
    flags = flags_of(lambda flags: give_transformer(flags, config))
    assert flags.values == expected and not flags.problems
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, activation_func=torch.tanh)
    assert "give one of swiglu" in flags_of(lambda flags: give_transformer(flags, config)).problems[0]


def test_a_module_without_what_a_run_needs_is_refused() -> None:
    module: Any = nn.Module()
    module.configure_optimizers, module.tokenizer = list, "gpt2"
    problems = flags_of(lambda flags: give_model(flags, module, None, "fit", None)).problems
    starts = ["Module.config is None", "tokenizer='gpt2'", "Module.configure_optimizers"]
    assert [problem.partition(":")[0] for problem in problems] == starts
    values = flags_of(lambda flags: give_model(flags, gpt(), None, "validate", None)).values
    assert values["vocab_size"] == 50 and values["max_position_embeddings"] == 16 and "lr" not in values


# ---------------------------------------------------------------------------------------------------------------------
# Trainer, folders, data


def test_a_trainer_gives_length_evaluations_and_folders(tmp_path: Path) -> None:
    logger = type("WandbLogger", (), {"_wandb_init": {"project": "p", "name": "n"}})()
    made = nl.Trainer(
        strategy=nl.MegatronStrategy(),
        accelerator="cpu",
        devices=[0],
        max_steps=7,
        max_time="00:01:30:00",
        gradient_clip_val=0.5,
        limit_val_batches=3,
        val_check_interval=4,
        deterministic=True,
        precision="bf16-mixed",
        callbacks=nl.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, monitor="step"),
        logger=logger,
        enable_progress_bar=True,
    )
    nl.NeMoLogger(explicit_log_dir="logs", tensorboard=type("TensorBoardLogger", (), {})()).setup(made)
    nl.AutoResume(resume_if_exists=True).setup(made)
    flags = flags_of(lambda flags: give_trainer(flags, made, "fit", StageData("fit", None, {})))
    expected = {
        "train_iters": 7,
        "exit_duration_in_mins": 90,
        "clip_grad": 0.5,
        "log_interval": 50,
        "bf16": True,
        "eval_iters": 3,
        "eval_interval": 4,
        "deterministic_mode": True,
        "save": str(tmp_path),
        "save_interval": 2,
        "keep_last": 3,
        "async_save": True,
        "wandb_project": "p",
        "wandb_exp_name": "n",
        "load": str(tmp_path),
        "tensorboard_dir": "logs",
        "exit_on_missing_checkpoint": True,
    }
    assert not flags.problems and flags.values.items() >= expected.items()
    assert ["enable_progress_bar" in note for note in flags.notes] == [True]


def test_a_whole_set_is_asked_for_by_one_or_nothing() -> None:
    for stage in ("fit", "validate", "test"):
        loaders = {"train": [1], "valid": [1], "test": [1]}
        made, data = nl.Trainer(strategy=nl.MegatronStrategy(), max_steps=1), StageData(stage, None, loaders)
        flags = flags_of(lambda flags, made=made, data=data, stage=stage: give_trainer(flags, made, stage, data))
        assert flags.values["full_validation"] is True and flags.values["eval_iters"] == 1
        assert data.takes_whole_test is (stage == "test") and ("skip_train" in flags.values) is (stage != "fit")


def test_a_share_of_nothing_evaluates_nothing() -> None:
    made = nl.Trainer(strategy=nl.MegatronStrategy(), max_steps=1, limit_val_batches=0.0)
    flags = flags_of(lambda flags: give_trainer(flags, made, "fit", StageData("fit", None, {"valid": [1]})))
    assert flags.values["eval_iters"] == 0 and not flags.problems


def test_a_trainer_is_refused_what_it_cannot_do() -> None:
    made = nl.Trainer(
        strategy=nl.MegatronStrategy(),
        limit_train_batches=5,
        val_check_interval=0.3,
        gradient_clip_algorithm="value",
        fast_dev_run=True,
        profiler="simple",
        logger=object(),
    )
    problems = flags_of(lambda flags: give_trainer(flags, made, "fit", StageData("fit", None, {}))).problems
    assert [problem.partition(":")[0] for problem in problems] == [
        "Trainer(profiler='simple')",
        "max_steps=-1",
        "limit_train_batches=5",
        "val_check_interval=0.3",
        "gradient_clip_algorithm",
        "fast_dev_run=True",
        "logger=<object>",
    ]


def test_minutes_of_a_time() -> None:
    times = (None, "01:00:00:00", {"hours": 2}, datetime.timedelta(seconds=1))
    assert [minutes_of(time) for time in times] == [0, 1440, 120, 1]


def test_folders_of_checkpoints() -> None:
    flags = Flags()
    give_ckpt_path(flags, "runs/iter_0000012")
    assert flags.values == {"load": "runs", "ckpt_step": 12, "exit_on_missing_checkpoint": True}
    give_ckpt_path(flags, "last")
    assert flags.problems[0].startswith('ckpt_path="last"')
    give_saving(flags, type("ModelCheckpoint", (), {"dirpath": None})(), None, False)
    assert flags.notes == ["no checkpoint is saved: ModelCheckpoint has neither dirpath nor every_n_train_steps"]
    assert nl.NeMoLogger("a", "logs", version="v1").folder == Path("logs/a/v1")
    problems = [
        flags_of(nl.AutoResume(resume_if_exists=True).give_flags).problems,
        flags_of(nl.RestoreConfig("x", load_model_state=False).give_flags).problems,
        flags_of(lambda flags: nl.NeMoLogger(files_to_copy=["a"]).give_flags(flags, True)).problems,
    ]
    assert all(len(each) == 1 for each in problems)


class Pairs(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        return number


def test_a_loader_gives_its_batches() -> None:
    flags = flags_of(lambda flags: data_of(DataLoader(Pairs(), batch_size=2)).give_flags(flags, None, 3))
    assert flags.values == {"micro_batch_size": 2, "num_workers": 0, "global_batch_size": 6}
    drawn = RandomSampler(Pairs())
    flags = flags_of(lambda flags: data_of(DataLoader(Pairs(), sampler=drawn)).give_flags(flags, None, 1))
    assert flags.values["dataloader_type"] == "cyclic"
    flags = flags_of(lambda flags: data_of([iter(())]).give_flags(flags, nl.MegatronDataSampler(4), 1))
    assert "give one loader" in flags.problems[0] and flags.values["seq_length"] == 4
    weighted = WeightedRandomSampler([1.0] * 8, 8)
    flags = flags_of(lambda flags: data_of(DataLoader(Pairs(), sampler=weighted)).give_flags(flags, None, 1))
    assert "the DataLoader has a sampler" in flags.problems[0]
    flags = flags_of(lambda flags: data_of(iter(())).give_flags(flags, None, 1))
    assert flags.values == {"dataloader_type": "external"}


class OwnLoaders(llm.MockDataModule):
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(Pairs(), batch_size=2)


def test_a_data_module_with_loaders_of_its_own_is_asked_for_them() -> None:
    data = StageData("fit", OwnLoaders(8, micro_batch_size=2, global_batch_size=4), {})
    data.open()
    flags = flags_of(lambda flags: data.give_flags(flags, None, 1))
    assert "mock_data" not in flags.values and flags.values["global_batch_size"] == 4
    assert isinstance(data.loaders["train"], DataLoader) and data.loaders["valid"] is None


def data_of(loader: object) -> StageData:
    return StageData("fit", None, {"train": loader})


def test_data_parallel_ranks_are_what_the_layout_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    flags = Flags()
    flags.give("tensor_model_parallel_size", 2)
    flags.give("context_parallel_size", 2)
    assert data_parallel_size(flags) == 4


def test_a_strategy_of_another_class_is_refused() -> None:
    with pytest.raises(UserError, match=r"strategy=<NoneType>\): give an nl.MegatronStrategy"):
        nl.Trainer(max_steps=1).fit(nn.Linear(1, 1), [1])


def test_callbacks_become_flags() -> None:
    flags = Flags()
    run_callbacks.NsysCallback(start_step=5, end_step=7, ranks=[1]).give_flags(flags)
    run_callbacks.PreemptionCallback().give_flags(flags)
    run_callbacks.FLOPsMeasurementCallback(object(), None, "llama").give_flags(flags)
    run_callbacks.DDPParityChecker(interval=10).give_flags(flags)
    assert flags.values.items() >= {"profile": True, "profile_step_start": 5, "profile_step_end": 7}.items()
    assert flags.values["profile_ranks"] == [1] and flags.values["exit_signal_handler"] is True
    assert flags.values["log_throughput"] is True
    assert flags.values["check_weight_hash_across_dp_replicas_interval"] == 10
    assert not flags.problems
