"""Checks that the data sets of a run and its tokenizer fit together, before the model is built."""

import sys
from collections.abc import Callable
from functools import partial

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.bert_data import bert_dataset_config
from megatron.training.data.gpt_data import gpt_dataset_config
from megatron.training.data.sources import prefixes_of_run
from megatron.training.data.t5_data import t5_dataset_config
from megatron.training.data_preparation.checks import check_data, check_manifest
from megatron.training.tokenizer.base import Tokenizer

_DATASET_CONFIGS = {"gpt": gpt_dataset_config, "bert": bert_dataset_config, "t5": t5_dataset_config}
"""For each model family: the function that makes the config of its data sets, which checks the tokenizer."""


def check_data_of_run(config: PretrainConfig, tokenizer: Tokenizer, *, reads_data: bool = True) -> None:
    """Raises UserError, the same on all ranks, if another tokenizer made the data of the run, or if the tokenizer lacks
    a special token that samples of the model's family need. Leaves out data that a script builds. Without `reads_data`
    only manifests are compared with the tokenizer; otherwise files are compared with their manifests, and all ids are
    read where there is none. Collective."""
    of_script = config.data.datasets_of_script or config.data.dataloader_type == "external"
    if not of_script and config.data.sources():
        RankCoordinator().run_on_first(
            partial(_check_data, config, tokenizer, check_data if reads_data else partial(check_manifest, files=False))
        )


def _check_data(config: PretrainConfig, tokenizer: Tokenizer, check: Callable[..., object]) -> None:
    if config.model.model_family is not None:
        _DATASET_CONFIGS[config.model.model_family](config, tokenizer)
    if config.training.sft:  # conversations are encoded when they are read
        return
    vocab_size = config.tokenizer.model_vocab_size(tokenizer.vocab_size)
    for prefix in sorted(prefixes_of_run(config)):
        check(prefix, tokenizer, vocab_size, _warn)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
