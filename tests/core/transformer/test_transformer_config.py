"""The library's configs: Megatron-LM's fields and defaults, derived values, refusals."""

import dataclasses
import enum
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.declarations.config_fields import field_docstrings
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.initializers import Normal
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

MEGATRON_LM = json.loads((Path(__file__).parents[2] / "data/flags/megatron_lm_config_fields.json").read_text())
CONFIGS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        ModelParallelConfig,
        TransformerConfig,
        MLATransformerConfig,
        OptimizerConfig,
        DistributedDataParallelConfig,
    )
}
OTHER_DEFAULTS = {"transformer_impl": "auto", "is_hybrid_model": "None", "muon_tp_mode": "distributed"}


def small(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4} | fields)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_megatron_lm_is_there_with_its_default(name: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(CONFIGS[name])}
    for statement in MEGATRON_LM[name]:
        field, _, rest = statement.partition(":")
        assert field in fields, statement
        megatron_lm = rest.rpartition(" = ")[2].strip("'")
        if megatron_lm == "factory":
            assert fields[field].default_factory is list
        else:
            ours = fields[field].default
            shown = repr(ours) if isinstance(ours, enum.Enum) else str(ours)
            assert shown == OTHER_DEFAULTS.get(field, megatron_lm), statement


@pytest.mark.parametrize("cls", CONFIGS.values(), ids=CONFIGS)
def test_every_field_says_what_it_means(cls: type) -> None:
    assert {field.name for field in dataclasses.fields(cls)} <= field_docstrings(cls).keys()


def test_derived_values() -> None:
    config = small()
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (256, 16, 4)
    assert config.add_qkv_bias and config.params_dtype is torch.float32
    assert config.init_method == config.embedding_init_method == Normal(0.02)
    assert config.output_layer_init_method == Normal(0.02 / math.sqrt(2 * 2))
    assert small(add_bias_linear=False).add_qkv_bias is False
    assert small(embedding_init_method_std=1.0).embedding_init_method == Normal(1.0)


def test_a_given_init_method_stands_and_serves_the_embedding_too() -> None:
    config = small(init_method=nn.init.zeros_)
    assert config.init_method is nn.init.zeros_ and config.embedding_init_method is nn.init.zeros_
    assert isinstance(config.output_layer_init_method, Normal)


@pytest.mark.parametrize(
    ("flag", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp64", torch.float64)]
)
def test_number_formats(flag: str, dtype: torch.dtype) -> None:
    config = small(**{flag: True})
    assert config.params_dtype is dtype and config.pipeline_dtype is dtype
    assert small(params_dtype=torch.bfloat16).params_dtype is torch.bfloat16


def test_megatron_lm_example_builds_a_config() -> None:
    TransformerConfig(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float16,
    )


def test_a_config_can_be_extended_by_a_user() -> None:
    @dataclasses.dataclass
    class Mine(TransformerConfig):
        extra: int = 3

    assert Mine(num_layers=1, hidden_size=8, num_attention_heads=2).extra == 3


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_groups_of_keys_and_values_may_be_fewer_than_tensor_parallel_ranks(groups: int) -> None:
    config = small(num_attention_heads=8, num_query_groups=groups, tensor_model_parallel_size=8)
    assert config.num_query_groups == groups
