"""Makes the config of a GPT run's data sets from its flags."""

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.sources import shared_fields
from megatron.training.tokenizer.base import Tokenizer


def gpt_dataset_config(config: PretrainConfig, tokenizer: Tokenizer) -> GPTDatasetConfig:
    """Returns the config of the run's data sets. Raises UserError if another tokenizer made the data."""
    return GPTDatasetConfig(
        **shared_fields(config, tokenizer),
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        eod_mask_loss=config.data.eod_mask_loss,
        create_attention_mask=False,
    )
