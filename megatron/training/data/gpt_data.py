"""Makes the config of a GPT run's data sets from its flags."""

import dataclasses

from megatron.data.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.data.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.data.datasets.sft_dataset import SFTDataset
from megatron.data.tokenizer.base import Tokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.sources import shared_fields


def gpt_dataset_config(config: PretrainConfig, tokenizer: Tokenizer) -> GPTDatasetConfig:
    """Returns the config of the run's data sets."""
    fields = shared_fields(config, tokenizer) | {
        "reset_position_ids": config.data.reset_position_ids,
        "reset_attention_mask": config.data.reset_attention_mask,
        "eod_mask_loss": config.data.eod_mask_loss,
        "create_attention_mask": False,
        "object_storage_cache_path": config.data.object_storage_cache_path,
        "full_validation": config.evaluation.full_validation,
    }
    if not config.data.fim_data:
        return GPTDatasetConfig(**fields)
    return GPTFIMDatasetConfig(**fields, **{name: getattr(config.data, name) for name in _FIM_FIELDS})


def gpt_dataset_kind(config: PretrainConfig) -> type[GPTDataset] | type[SFTDataset]:
    """Returns the class of a run's data sets."""
    if config.data.mock_data:
        return MockGPTDataset
    if config.training.sft:
        return SFTDataset
    return GPTFIMDataset if config.data.fim_data else GPTDataset


_FIM_FIELDS = [
    field.name
    for field in dataclasses.fields(GPTFIMDatasetConfig)
    if field.name.startswith("fim_") and field.name != "fim_extra_tokens"  # the marks of scripts that have no flags
]
