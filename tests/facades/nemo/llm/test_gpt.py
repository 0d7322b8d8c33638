"""NeMo's GPT, its sizes, tokenizers, data modules and functions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.nemo_runs import gpt

from megatron.core.exceptions import UserError
from megatron.facades.nemo import lightning as nl
from megatron.facades.nemo import llm
from megatron.facades.nemo.lightning.data import StageData
from megatron.facades.nemo.lightning.flags import Flags
from megatron.facades.nemo.lightning.model_flags import give_model
from megatron.facades.nemo.lightning.trainer_flags import give_trainer
from megatron.facades.nemo.llm.config import OF_RECIPES
from megatron.training.config.flag_table import flag_table
from megatron.training.config.recipes.catalogue import recipe_named


def values_of(made: Any) -> dict[str, object]:
    flags = Flags()
    made.give_flags(flags)
    assert not flags.problems
    return flags.values


def test_llamas_sizes_are_those_of_the_recipe() -> None:
    values, recipe = values_of(llm.Llama3Config8B()), recipe_named("llama3-8b").flags
    shape = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "rotary_base")
    assert {name: values[name] for name in shape} == {name: recipe[name] for name in shape}
    switches = {"swiglu": True, "group_query_attention": True, "untie_embeddings_and_output_weights": True}
    more = {"normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False}
    assert values.items() >= (switches | more).items() and values["init_method_std"] == 0.01
    assert llm.Llama3Config8B is llm.Llama3Config8B and issubclass(llm.Llama3Config8B, llm.LlamaConfig)


_OF_A_RUN = "adam_beta2 weight_decay lr_decay_style lr_warmup_fraction lr min_lr seq_length max_position_embeddings"
_FASTER = ("bias_gelu_fusion", "init_method_std")  # of speed, and NeMo's own value for Llama 3


@pytest.mark.parametrize("name", OF_RECIPES)
def test_classes_of_recipes_describe_the_model_of_the_recipe(name: str) -> None:
    found, table = dict(values_of(getattr(llm, name)())), flag_table()
    scaling = found.pop("use_rope_scaling", False)
    assert found.setdefault("rope_scaling_type", "llama3" if scaling else None) == ("llama3" if scaling else None)
    wanted = dict(recipe_named(OF_RECIPES[name][1]).flags)
    for field in (found.keys() | wanted.keys()) - {*_OF_A_RUN.split(), *_FASTER}:
        value = wanted.get(field, table[field].default)
        value = table[field].parse(value) if isinstance(value, str) else value
        derived = found.get(field) if field in ("kv_channels", "ffn_hidden_size") and field not in wanted else value
        assert found.get(field, table[field].default) == derived, field
    assert getattr(llm, name)(num_layers=2).num_layers == 2


def test_options_of_a_gpt_become_flags() -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    values = values_of(llm.GPTConfig(**sizes, scale_factor=8.0, seq_len_interpolation_factor=2.0))
    assert values["use_rope_scaling"] is True and values["rotary_seq_len_interpolation_factor"] == 2.0
    flags = Flags()
    llm.GPTConfig(**sizes, transformer_layer_spec=list).give_flags(flags)
    assert "GPTConfig(transformer_layer_spec=...)" in flags.problems[0]
    with pytest.raises(AttributeError, match="no attribute 'Qwen9Config'"):
        print(llm.Qwen9Config)


def test_tokenizers_name_files() -> None:
    tokenizers = llm.tokenizer
    assert values_of(tokenizers.AutoTokenizer("folder")) == {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "folder",
    }
    bpe = tokenizers.get_nmt_tokenizer("megatron", "GPT2BPETokenizer", vocab_file="v", merges_file="m")
    assert values_of(bpe) == {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v", "merge_file": "m"}
    for arguments in (("char",), ("null",)):
        with pytest.raises(UserError, match="get_nmt_tokenizer"):
            tokenizers.get_nmt_tokenizer(*arguments)
    with pytest.raises(UserError, match=r"get_nmt_tokenizer\(use_fast\)"):
        tokenizers.AutoTokenizer("folder", use_fast=True)


def test_data_modules_name_files() -> None:
    values = values_of(llm.PreTrainingDataModule([0.3, "a", 0.7, "b"], split="8,1,1", reset_attention_mask=True))
    expected = {"data_path": ["0.3", "a", "0.7", "b"], "split": "8,1,1", "reset_attention_mask": True}
    assert values.items() >= expected.items() and values["seq_length"] == 2048
    paths = {"train": "a", "validation": ["b"], "test": "c"}
    values = values_of(llm.PreTrainingDataModule(paths))
    names = ("train_data_path", "valid_data_path", "test_data_path", "split")
    assert [values.get(name) for name in names] == [["a"], ["b"], ["c"], None]
    flags = Flags()
    llm.PreTrainingDataModule({"dev": "a"}, init_global_step=3).give_flags(flags)
    assert len(flags.problems) == 2
    assert values_of(llm.MockDataModule())["mock_data"] is True
    assert isinstance(llm.MockDataModule(8, micro_batch_size=1).data_sampler, nl.MegatronDataSampler)


def problems_and_values(data: Any, **trainer: Any) -> tuple[str, dict[str, object]]:
    """The problems and the settings of a fit of a GPT without a size of the vocabulary, as NeMo's quickstart has it."""
    parts = nl.Trainer(strategy=nl.MegatronStrategy(), accelerator="cpu", max_steps=5, **trainer)
    flags = Flags()
    give_trainer(flags, parts, "fit", StageData("fit", data, {}))
    give_model(flags, gpt(vocab_size=None), data, "fit", parts)
    return " ".join(flags.problems), flags.values


def test_a_fit_on_made_up_data_ends_without_further_arguments() -> None:
    """The whole validation set of made-up data would take days; NeMo evaluates at the end of an epoch, if at all."""
    data = llm.MockDataModule(16, global_batch_size=4, num_val_samples=12)
    problems, values = problems_and_values(data)
    assert (problems, values["eval_iters"], values["vocab_size"]) == ("", 0, 50257) and "full_validation" not in values
    _, values = problems_and_values(data, val_check_interval=2)
    assert values["eval_iters"] == 3 and "full_validation" not in values


def test_files_of_ids_need_a_tokenizer_or_the_size_of_the_vocabulary() -> None:
    problems, _ = problems_and_values(llm.PreTrainingDataModule("prefix"))
    assert "PreTrainingDataModule has no tokenizer: give it tokenizer=" in problems and "vocab_size" in problems


def test_a_model_refuses_what_it_does_not_do() -> None:
    with pytest.raises(UserError, match=r"GPTModel\(model_transform=...\)"):
        llm.GPTModel(llm.GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=1), model_transform=print)


def test_a_forward_step_calls_the_model() -> None:
    batch = {"tokens": torch.ones(1, 4), "position_ids": torch.arange(4)[None], "labels": torch.ones(1, 4)}
    given: dict[str, Any] = {}
    llm.gpt_forward_step(lambda **arguments: given.update(arguments), batch)
    assert given["input_ids"] is batch["tokens"] and given["attention_mask"] is None and "tokens" not in given
    model = gpt()
    model.config.forward_step_fn = lambda module, data: (module, data)
    model.config.data_step_fn = list
    assert model.training_step(1) == model.validation_step(1, 0) == model.test_step(1) == (model, 1)
    assert model.data_step(iter("a")) == ["a"]


def test_pretrain_hands_everything_to_the_trainer() -> None:
    calls: list[Any] = []
    trainer = SimpleNamespace(
        fit=lambda model, datamodule: calls.append(("fit", model.tokenizer)),
        validate=lambda model, datamodule: calls.append(("validate", model.tokenizer)),
    )
    model, data, log = gpt(), llm.MockDataModule(tokenizer="t"), nl.NeMoLogger("run", "logs")
    optim = nl.MegatronOptimizerModule()
    assert llm.pretrain(model, data, trainer, log, nl.AutoResume(), optim) == Path("logs/run")
    assert llm.validate(model, data, trainer, tokenizer="other") is None
    assert calls == [("fit", "t"), ("validate", "other")] and model.optim is optim and trainer.nemo_log is log
    with pytest.raises(UserError, match="model_transform: not yet"):
        llm.train(model, data, trainer, model_transform=print)
